"""Wrong answers to the exercises of chapter 18, and what each must be told."""

from notebooks.checks.two_speeds_of_wire import check_block, check_blocks_of_a_nic, check_seconds


def block(host, device):
    """Rank r in round t: host(a, i, u, s, n, g) and device(...) of the block, with a, i = r's and t = u·g + s."""

    def answer(rank, t, n, g):
        numbers = *divmod(rank, g), *divmod(t, g), n, g
        return host(*numbers) % n * g + device(*numbers) % g

    return answer


def own_host(a, i, u, s, n, g):
    return a - u


def own_device(a, i, u, s, n, g):
    return i - s


def transposed(rank, t, n, g):
    device, host = divmod(rank, n)
    return (host - t // g) % n * g + (device - t) % g


def seconds(turns, turn_of):
    """turns(n, turn, slow), where turn = turn_of(g, computing, fast)."""
    return lambda n, g, computing, fast, slow: turns(n, turn_of(g, computing, fast), slow)


def right_turn(g, computing, fast):
    return computing + (g - 1) * max(computing, fast)


def right_turns(n, turn, slow):
    return turn + (n - 1) * max(turn, slow)


WRONG_ANSWERS = [
    (check_block, lambda rank, t, n, g: (rank - t) % (n * g), "that is the flat ring"),
    (check_block, block(lambda a, i, u, s, n, g: a - u * g - s, own_device), "once a turn"),
    (check_block, block(lambda a, i, u, s, n, g: a, own_device), "never leaves the host"),
    (check_block, block(own_host, lambda a, i, u, s, n, g: i), "turn inside the host"),
    (check_block, lambda r, t, n, g: (r // g - t // g) % n + (r % g - t) % g, "has the number host * g"),
    (check_block, block(lambda a, i, u, s, n, g: a + u, lambda a, i, u, s, n, g: i + s), "minus"),
    (check_block, block(lambda a, i, u, s, n, g: a + u, own_device), "turns go the wrong way"),
    (check_block, lambda r, t, n, g: (r // g - t // n) % n * g + (r % g - t) % g, "g rounds, not n"),
    (check_block, block(lambda a, i, u, s, n, g: a - u - (s + 1) // g, own_device), "a round too early"),
    (check_block, block(own_host, lambda a, i, u, s, n, g: i - s - u * (g - 1)), "the time of one round only"),
    (check_block, transposed, "the host is rank // g"),
    (check_block, lambda rank, t, n, g: rank, "wrong in"),
    (check_block, lambda rank, t, n, g: None, "expected a number"),
    (check_blocks_of_a_nic, lambda n, g, nics: n * g - 1, "the flat ring"),
    (check_blocks_of_a_nic, lambda n, g, nics: n * g / nics, "n - 1 slow hops"),
    (check_blocks_of_a_nic, lambda n, g, nics: n - 1, "one NIC for each device"),
    (check_blocks_of_a_nic, lambda n, g, nics: (n - 1) * g, "the whole host"),
    (check_blocks_of_a_nic, lambda n, g, nics: (n * g - 1) / nics, "only the slow hops use a NIC"),
    (check_blocks_of_a_nic, lambda n, g, nics: g / nics, "that is a slow hop"),
    (check_blocks_of_a_nic, lambda n, g, nics: (n - 1) * nics / g, "more to send, not less"),
    (check_blocks_of_a_nic, lambda n, g, nics: n, "wrong in 5 of 5 cases; with n = 16"),
    (check_blocks_of_a_nic, 15, "expected a function, got int"),
    (check_seconds, lambda n, g, c, fast, slow: c + (n * g - 1) * max(c, fast, slow), "that is the flat ring"),
    (check_seconds, seconds(lambda n, turn, slow: n * max(turn, slow), right_turn), "n - 1, not n"),
    (check_seconds, seconds(lambda n, turn, slow: n * turn + (n - 1) * slow, right_turn), "not their sum"),
    (check_seconds, seconds(right_turns, lambda g, c, fast: g * c), "a fast hop takes time too"),
    (check_seconds, seconds(right_turns, lambda g, c, fast: g * max(c, fast)), "its last round only computes"),
    (
        check_seconds,
        lambda n, g, c, fast, slow: right_turn(g, c, fast) + (n - 1) * (right_turn(g, c, fast) - c + max(c, slow)),
        "not with its last round",
    ),
    (check_seconds, seconds(right_turns, lambda g, c, fast: g * c + (g - 1) * fast), "fast hops travel while"),
    (check_seconds, seconds(lambda n, turn, slow: n * turn, right_turn), "leaves the slow hops out"),
    (check_seconds, seconds(lambda n, turn, slow: turn + (n - 1) * slow, right_turn), "for the slow hops only"),
    (check_seconds, lambda n, g, c, fast, slow: 1.0, "wrong in 5 of 5 cases"),
    (
        check_blocks_of_a_nic,
        lambda n, g, nics: {(16, 8, 8): 15, (16, 8, 4): 30}.get((n, g, nics), 4),
        "wrong in 2 of 5",
    ),
]

"""Checks of chapter 18: the block in hand, the blocks on a NIC."""

from notebooks.source.checks.answers import Exercise


def _block(host, device):
    """host(a, i, u, s, n, g) and device(...) of the block, of rank a·g + i in round u·g + s."""

    def answer(rank, t, n, g):
        numbers = *divmod(rank, g), *divmod(t, g), n, g
        return host(*numbers) % n * g + device(*numbers) % g

    return answer


def _place(random):
    n, g = random.randint(1, 9), random.randint(1, 9)
    return random.randrange(n * g), random.randrange(n * g), n, g


def _turn(a, i, u, s, n, g):
    return a - u


def _inside(a, i, u, s, n, g):
    return i - s


check_block = Exercise(  # rank, round, hosts, devices of a host -> the block in hand
    right=_block(_turn, _inside),
    wrong={
        "that is the flat ring, whose blocks leave the host in every round": lambda rank, t, n, g: (rank - t) % (n * g),
        "the host part changes once a turn of g rounds, not in every round": _block(
            lambda a, i, u, s, n, g: a - u * g - s, _inside
        ),
        "that never leaves the host: after a turn the blocks of the host before are due": _block(
            lambda a, *_: a, _inside
        ),
        "the blocks must turn inside the host, too": _block(_turn, lambda a, i, *_: i),
        "the first block of a host has the number host * g": lambda rank, t, n, g: (
            (rank // g - t // g) % n + (rank % g - t) % g
        ),
        "blocks go to the next rank, so they come from the one before: minus": _block(
            lambda a, i, u, *_: a + u, lambda a, i, u, s, n, g: i + s
        ),
        "the turns go the wrong way: blocks come from the host before": _block(lambda a, i, u, *_: a + u, _inside),
        "a turn has g rounds, not n": _block(lambda a, i, u, s, n, g: a - (u * g + s) // n, _inside),
        "the blocks of the next host come a round too early": _block(
            lambda a, i, u, s, n, g: a - (u * g + s + 1) // g, _inside
        ),
        "there the block that ends a turn goes on, and the slow hop has the time of one round only": _block(
            _turn, lambda a, i, u, s, n, g: i - s - u * (g - 1)
        ),
        "rank = host * g + device: the host is rank // g, not rank % n": lambda rank, t, n, g: (
            (rank % n - t // g) % n * g + (rank // n - t) % g
        ),
    },
    cases={
        "(host - turn) % n * g + (device - round of the turn) % g": [
            (rank, t, n, g) for n, g in ((2, 4), (3, 2), (1, 3), (4, 1)) for t in range(n * g) for rank in range(n * g)
        ]
    },
    draw=_place,
    remark="every rank has every block in hand once, and each block of another host at the right time",
)


def _cluster(random):
    """Hosts, devices of a host, and NICs, each of which as many devices share."""
    nics = random.randint(1, 8)
    return random.randint(1, 99), nics * random.randint(1, 8), nics


check_blocks_of_a_nic = Exercise(  # hosts, devices of a host, NICs of a host -> blocks that a NIC sends forward
    right=lambda n, g, nics: (n - 1) * g / nics,
    wrong={
        "that is the flat ring, all of whose blocks leave the host at one device": lambda n, g, nics: n * g - 1,
        "a ring of n hosts has n - 1 slow hops: after the last turn nobody needs another block": (
            lambda n, g, nics: n * g / nics
        ),
        "that is one NIC for each device; with fewer NICs several devices share one": lambda n, g, nics: n - 1,
        "that is the whole host; it has several NICs": lambda n, g, nics: (n - 1) * g,
        "most hops stay inside the host: only the slow hops use a NIC": lambda n, g, nics: (n * g - 1) / nics,
        "that is a slow hop; a pass has n - 1 of them": lambda n, g, nics: g / nics,
        "fewer NICs have more to send, not less": lambda n, g, nics: (n - 1) * nics / g,
    },
    cases={
        "n - 1 slow hops, in each of which g devices share the NICs": [
            (16, 8, 8),
            (16, 8, 4),
            (2, 4, 1),
            (5, 6, 3),
            (1, 8, 2),
        ]
    },
    draw=_cluster,
    remark="16 hosts of 8 with a NIC for each device: 15 blocks; the one NIC that a flat ring uses sends 127",
)

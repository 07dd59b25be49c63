"""Checks of chapter 18: the block in hand, the blocks on a NIC."""

from collections.abc import Callable
from random import Random

from notebooks.source.checks.answers import compare_formula, exercise


def _place(random: Random) -> tuple[int, int, int, int]:
    """rank, t, n and g."""
    n, g = random.randint(1, 9), random.randint(1, 9)
    return random.randrange(n * g), random.randrange(n * g), n, g


@exercise
def check_block(answer: Callable[[int, int, int, int], int]) -> str | None:
    """(rank, round, hosts, devices of a host) -> the block in hand."""
    compare_formula(
        answer,
        lambda rank, t, n, g: (rank // g - t // g) % n * g + (rank % g - t % g) % g,
        {
            "that is the flat ring, whose blocks leave the host in every round": lambda r, t, n, g: (r - t) % (n * g),
            "the host part changes once a turn of g rounds, not in every round": lambda r, t, n, g: (
                (r // g - t) % n * g + (r % g - t) % g
            ),
            "that never leaves the host: after a turn the blocks of the host before are due": lambda r, t, n, g: (
                r // g * g + (r % g - t) % g
            ),
            "the blocks must turn inside the host, too": lambda r, t, n, g: (r // g - t // g) % n * g + r % g,
            "the first block of a host has the number host * g": lambda r, t, n, g: (
                (r // g - t // g) % n + (r % g - t) % g
            ),
            "blocks go to the next rank, so they come from the one before: minus": lambda r, t, n, g: (
                (r // g + t // g) % n * g + (r % g + t) % g
            ),
            "the turns go the wrong way: blocks come from the host before": lambda r, t, n, g: (
                (r // g + t // g) % n * g + (r % g - t) % g
            ),
            "a turn has g rounds, not n": lambda r, t, n, g: (r // g - t // n) % n * g + (r % g - t) % g,
            "the blocks of the next host come a round too early": lambda r, t, n, g: (
                (r // g - (t + 1) // g) % n * g + (r % g - t) % g
            ),
            "there the block that ends a turn goes on, and the slow hop has the time of one round only": (
                lambda r, t, n, g: (r // g - t // g) % n * g + (r % g - t % g - t // g * (g - 1)) % g
            ),
            "rank = host * g + device: the host is rank // g, not rank % n": lambda r, t, n, g: (
                (r % n - t // g) % n * g + (r // n - t) % g
            ),
        },
        [(rank, t, n, g) for n, g in ((2, 4), (3, 2), (1, 3), (4, 1)) for t in range(n * g) for rank in range(n * g)],
        "(host - turn) % n * g + (device - round of the turn) % g",
        _place,
    )
    return "every rank has every block in hand once, and each block of another host at the right time"


def _cluster(random: Random) -> tuple[int, int, int]:
    """Hosts, devices of a host, and NICs, each of which as many devices share."""
    nics = random.randint(1, 8)
    return random.randint(1, 99), nics * random.randint(1, 8), nics


@exercise
def check_blocks_of_a_nic(answer: Callable[[int, int, int], float]) -> str | None:
    """(hosts, devices of a host, NICs of a host) -> the blocks that a NIC sends in a forward pass."""
    compare_formula(
        answer,
        lambda n, g, nics: (n - 1) * g / nics,
        {
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
        [(16, 8, 8), (16, 8, 4), (2, 4, 1), (5, 6, 3), (1, 8, 2)],
        "n - 1 slow hops, in each of which g devices share the NICs",
        _cluster,
    )
    return "16 hosts of 8 with a NIC for each device: 15 blocks; the one NIC that a flat ring uses sends 127"

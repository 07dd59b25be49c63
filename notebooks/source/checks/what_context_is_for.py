"""Checks of chapter 15: the best keys of blocks that arrive in turn, and what a layer with chosen keys sends."""

from notebooks.source.checks.answers import Exercise


def _best(blocks, count):
    keys = sorted((-score, at) for scores, places in blocks for score, at in zip(scores, places, strict=True))
    return {at for _, at in keys[:count]}


def _late(blocks, count):
    keys = [(score, at) for scores, places in blocks for score, at in zip(scores, places, strict=True)]
    return {at for _, at in sorted(keys, key=lambda key: -key[0])[:count]}


def _drawn(random):
    P, C = random.randint(1, 4), random.randint(1, 5)
    blocks = [([float(random.randint(0, 3)) for _ in range(C)], [*range(j * C, j * C + C)]) for j in range(P)]
    return blocks[::-1], random.randint(1, P * C)


check_merge = Exercise(  # (scores, positions) of a query by block, count -> the positions of its best keys
    right=_best,
    wrong={
        "those are the best of the first block, the own one; others have better keys": (
            lambda blocks, count: _best(blocks[:1], count)
        ),
        "that is a share of the keys from each block; the best may all be in one": (
            lambda blocks, count: set().union(*(_best([block], max(1, count // len(blocks))) for block in blocks))
        ),
        "those are later keys of equal scores; the smaller positions win": _late,
        "those are the keys with the smallest scores": (
            lambda blocks, count: _best([([-x for x in scores], at) for scores, at in blocks], count)
        ),
    },
    cases={
        "the largest scores of all blocks; of equal ones the smaller positions": [
            ([([1.0, 5.0], [4, 5]), ([6.0, 3.0], [2, 3]), ([4.0, 2.0], [0, 1])], 3),
            ([([2.0, 1.0], [4, 5]), ([1.0, 2.0], [2, 3]), ([2.0, 2.0], [0, 1])], 2),
            ([([9.0, 8.0, 7.0], [3, 4, 5]), ([1.0, 1.0, 1.0], [0, 1, 2])], 2),
        ]
    },
    draw=_drawn,
    remark="each rank keeps count candidates of a query, and no row of S scores",
)

check_sent = Exercise(  # C, L, R, E, P -> the numbers that a rank sends in the forward pass
    right=lambda C, L, R, E, P: (P - 1) * C * (L + R + E),
    wrong={
        "the own block is there: P - 1 hops are enough": lambda C, L, R, E, P: P * C * (L + R + E),
        "the index keys travel too": lambda C, L, R, E, P: (P - 1) * C * (L + R),
        "the rotated numbers travel too": lambda C, L, R, E, P: (P - 1) * C * (L + E),
        "one latent serves K and V": lambda C, L, R, E, P: (P - 1) * C * (2 * L + R + E),
        "the rotated numbers are the same for all heads": lambda C, L, R, E, P: (P - 1) * C * (L + 128 * R + E),
        "that is one hop": lambda C, L, R, E, P: C * (L + R + E),
    },
    cases={
        "P - 1 hops of C tokens; an index key, a latent and the rotated numbers of each": [
            (8, 5, 3, 2, 4),
            (1024, 512, 64, 128, 8),
        ]
    },
    draw=lambda random: tuple(random.randint(2, 99) for _ in range(5)),
)

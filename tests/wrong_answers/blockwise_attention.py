"""Wrong answers to the exercises of chapter 2, and what each must be told."""

import math

import numpy as np
import torch

from notebooks.checks.blockwise_attention import check_blockwise, check_largest_tensor, check_visible_tiles
from tests.right_answers import blocks_by_lse


def whole(q, k, v, block_size):
    """Full attention at once: right, and not in blocks."""
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]), 1) @ v


def without_max(q, k, v, block_size):
    """Blocks of keys, sums of e^s as they are."""
    l, o = 0, 0
    for k_block, v_block in zip(k.split(block_size), v.split(block_size), strict=True):
        p = torch.exp(q @ k_block.T / math.sqrt(q.shape[1]))
        l, o = l + p.sum(1, keepdim=True), o + p @ v_block
    return o / l


def full_blocks_only(q, k, v, block_size):
    """Leaves out the last block where it is shorter."""
    keys = len(k) // block_size * block_size
    return whole(q, k[:keys], v[:keys], block_size)


def keeps_the_tiles(q, k, v, block_size):
    """Each tile is small, and all of them are kept."""
    tiles = [q @ k_j.T / math.sqrt(q.shape[1]) for k_j in k.split(block_size)]
    m = torch.stack([s.amax(1) for s in tiles]).amax(0)[:, None]
    p = [torch.exp(s - m) for s in tiles]
    out = sum(p_j @ v_j for p_j, v_j in zip(p, v.split(block_size), strict=True))
    return out / sum(p_j.sum(1, keepdim=True) for p_j in p)


def row_by_row(q, k, v, block_size):
    """Little memory, and no blocks of keys."""
    return torch.stack([torch.softmax(k @ row / math.sqrt(len(row)), 0) @ v for row in q])


def some_rows_at_a_time(q, k, v, block_size):
    return torch.cat([whole(rows, k, v, 0) for rows in q.split(8)])


def whole_in_numpy(q, k, v, block_size):
    q, k, v = (x.numpy() for x in (q, k, v))
    s = q @ k.T / math.sqrt(q.shape[1])
    p = np.exp(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ v


WRONG_ANSWERS = [
    (check_blockwise, lambda q, k, v, block_size: whole(q, k[:block_size], v[:block_size], 0), "in blocks of 1"),
    (check_blockwise, full_blocks_only, "with 7 keys in blocks of 3"),
    (check_blockwise, whole, "the scores of one block of keys at a time"),
    (check_blockwise, without_max, "keep a running max"),
    (
        check_blockwise,
        lambda q, k, v, block_size: torch.softmax(q @ k.T, 1) @ v,
        "not divided by sqrt(D), with 7 keys in blocks of 7",
    ),
    (
        check_blockwise,
        lambda q, k, v, block_size: whole(q, k, v, 0) if len(q) == 7 else q,
        "with 12 keys in blocks of 4",
    ),
    (check_blockwise, lambda q, k, v, block_size: whole(q, k, v, 0) * 1.001, "off by up to"),
    (check_blockwise, lambda q, k, v, block_size: q[:3], "expected shape (7, 4), got (3, 4)"),
    (check_visible_tiles, lambda n: n * n, "that is all of them"),
    (check_visible_tiles, lambda n: n * (n - 1) // 2, "diagonal"),
    (
        check_visible_tiles,
        lambda n: n // 2 * (n + 1) + n % 2,
        "with n = 3 you say 5: row i",
    ),  # right for 1 and for even n
    (check_visible_tiles, lambda n: n * n / 2, "half of the diagonal more"),
    (check_largest_tensor, 8 * 256 * 256 * 4, "tile of scores"),
    (check_largest_tensor, 8 * 10**12 * 4, "never made"),
    (check_largest_tensor, 8 * 10**6 * 64, "each is 4 bytes"),
    (check_largest_tensor, 10**6 * 64 * 4, "one head of 8"),
    (check_largest_tensor, 4 * 8 * 10**6 * 64 * 4, "the largest single one"),
    (check_largest_tensor, 17, "you say 17"),
    (check_largest_tensor, "2 GB", "expected a number, got str"),
    (check_blockwise, keeps_the_tiles, "keep none of them"),
    (check_blockwise, row_by_row, "you took 256 keys at once into a product"),
    (check_blockwise, some_rows_at_a_time, "you took 256 keys at once into a product"),
    (check_blockwise, lambda q, k, v, n: blocks_by_lse(q, k, v, 24), "you took 24 keys at once into a product"),
    (check_blockwise, whole_in_numpy, "keep none of them"),
    (check_blockwise, lambda q, k, v, n: whole(q, k, v, 0) if len(q) in (7, 12, 5, 256) else q, "off by up to"),
    (check_blockwise, lambda q, k, v, n: v, "off by up to"),
    (check_blockwise, lambda q, k, v, n: whole(q, v, k, 0), "off by up to"),
    (check_blockwise, lambda q, k, v, n: whole(q, k, v, 0).T, "expected shape (7, 4), got (4, 7)"),
    (check_visible_tiles, lambda n: n, "the tiles on the diagonal"),
    (check_visible_tiles, lambda n: n * n // 2, "half of"),
    (check_visible_tiles, lambda n: {1: 1, 2: 3, 3: 6, 4: 10, 5: 15, 32: 528}.get(n, 0), "right in 6 cases, but with"),
]

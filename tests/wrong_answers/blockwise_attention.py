"""Wrong answers to the exercises of chapter 2, and what each must be told."""

import math

import torch

from notebooks.checks.blockwise_attention import check_blockwise, check_largest_tensor, check_visible_tiles


def first_block_only(q, k, v, block_size):
    return torch.softmax(q @ k[:block_size].T / math.sqrt(q.shape[1]), 1) @ v[:block_size]


WRONG_ANSWERS = [
    (check_blockwise, first_block_only, "in blocks of 1"),
    (check_blockwise, lambda q, k, v, block_size: q[:3], "expected shape (7, 4), got (3, 4)"),
    (check_visible_tiles, lambda n: n * n, "that is all of them"),
    (check_visible_tiles, lambda n: n * (n - 1) // 2, "diagonal"),
    (check_largest_tensor, 8 * 256 * 256 * 4, "tile of scores"),
    (check_largest_tensor, 17, "you say 17"),
]

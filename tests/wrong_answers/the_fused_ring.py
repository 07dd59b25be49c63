"""Wrong answers to the exercises of chapter 8, and what each must be told."""

import torch

from notebooks.checks.the_fused_ring import check_attention_on_a_kernel, check_bytes_of_training, check_merging_share

KV = 2 * 8 * 16384 * 128  # numbers in K and V of a block, with 8 heads of K and V


def outs_of(kernel, q, k, v, blocks):
    return [kernel(q, k_j, v_j)[0] for k_j, v_j in zip(k.chunk(blocks), v.chunk(blocks), strict=True)]


WRONG_ANSWERS = [
    (check_merging_share, lambda lse, lse_j: torch.sigmoid(lse - lse_j), "merged before"),
    (check_merging_share, lambda lse, lse_j: lse_j.exp(), "divide by the sum"),
    (check_merging_share, lambda lse, lse_j: lse_j.exp() / (lse.exp() + lse_j.exp()), "overflows"),
    (check_merging_share, lambda lse, lse_j: lse_j - lse, "e^lse_j / (e^lse + e^lse_j)"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: kernel(q, k, v)[0], "expected 3 blocks of 4"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: sum(outs_of(kernel, q, k, v, n)) / n, "average"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: sum(outs_of(kernel, q, k, v, n)), "the sum of"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: outs_of(kernel, q, k, v, n)[0], "after each merge"),
    (check_bytes_of_training, 4 * 60 * KV, "not with 32"),
    (check_bytes_of_training, (28 + 16) * KV, "in float32"),
    (check_bytes_of_training, (28 + 28) * KV, "brings them home"),
    (check_bytes_of_training, (14 + 32) * KV, "go round twice"),
    (check_bytes_of_training, 30 * KV, "both gradients"),
    (check_bytes_of_training, 1, "7 hops of K and V"),
]

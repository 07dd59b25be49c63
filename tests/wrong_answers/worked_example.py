"""Wrong answers to the exercises of chapter 3, and what each must be told."""

import numpy as np
import torch

from notebooks.checks.worked_example import check_blocks_of_gpu, check_mended_sum, check_token_two_in_round_two

WRONG_ANSWERS = [
    (check_blocks_of_gpu, 2, "expected a list of four numbers, got int"),
    (check_blocks_of_gpu, [2, 1, 0], "got 3 value(s)"),
    (check_blocks_of_gpu, [2, 3, 0, 1], "the other way"),
    (check_blocks_of_gpu, [0, 1, 2, 3], "its own block"),
    (check_token_two_in_round_two, (0.120, 4.243), "expected 3 values (f, m, l), got 2 value(s)"),
    (check_token_two_in_round_two, (0.120, 4.243, 3.222), "l: rescale the old l = 1.979 by f first"),
    (check_token_two_in_round_two, (0.120, 4.243, 1.243), "l: add the old l too"),
    (check_token_two_in_round_two, (0.120, 4.243, 0.237), "l: that is the old part"),
    (check_token_two_in_round_two, (0.120, 4.243, 3.5), "l: rescale the old l = 1.979 by f, then add"),
    (check_token_two_in_round_two, (8.342, 4.243, 1.480), "f: turned over"),
    (check_token_two_in_round_two, (1.0, 4.243, 1.480), "f: the old max is 2.121"),
    (check_token_two_in_round_two, (0.120, 2.828, 1.480), "m is the larger one"),
    (check_token_two_in_round_two, (0.120, 6, 1.480), "divide by sqrt(2)"),
    (check_token_two_in_round_two, (0.12, 4.24, 1.48), "4.24 is right but not exact enough: give 3 decimals"),
    (check_mended_sum, lambda outs, lses: outs.sum(0), "published sum"),
    (check_mended_sum, lambda outs, lses: outs.mean(0), "average of averages"),
    (check_mended_sum, lambda outs, lses: lses @ outs, "not lse itself"),
    (check_mended_sum, lambda outs, lses: lses / lses.sum() @ outs, "not lse itself"),
    (check_mended_sum, lambda outs, lses: lses.exp() @ outs, "must add up to 1"),
    (check_mended_sum, lambda outs, lses: lses.exp() / lses.exp().sum() @ outs, "e^1000 overflows"),
    (check_mended_sum, lambda outs, lses: torch.softmax(lses, 0) @ outs if len(outs) == 4 else outs[0], "off by up to"),
    (check_mended_sum, lambda outs, lses: torch.softmax(lses, 0) @ outs + 1e-3, "off by up to 0.001"),
    (check_token_two_in_round_two, (4.243, 0.120, 1.480), "another order, m, f, l: return f, m, l"),
    (check_token_two_in_round_two, (0.120, 1.480, 4.243), "another order, f, l, m: return f, m, l"),
    (check_token_two_in_round_two, np.array([1.480, 4.243, 0.120]), "another order, l, m, f: return f, m, l"),
    (check_token_two_in_round_two, {"f": 0.120, "m": 4.243, "l": 1.480}, "expected 3 values (f, m, l), got dict"),
    (check_token_two_in_round_two, ("0.120", "4.243", "1.480"), "expected a number, got str"),
    (check_blocks_of_gpu, [2, 1, 0, -1], "there is no block -1"),
    (check_blocks_of_gpu, [2, 2, 2, 2], "its own block in all rounds"),
    (check_blocks_of_gpu, [1, 0, 3, 2], "its own block"),
    (check_blocks_of_gpu, {0: 2, 1: 1, 2: 0, 3: 3}, "expected a list of four numbers, got dict"),
    (check_blocks_of_gpu, ["KV2", "KV1", "KV0", "KV3"], "expected a number, got str"),
    (check_blocks_of_gpu, "2103", "expected a list of four numbers, got str"),
    (check_mended_sum, lambda outs, lses: outs[lses.argmax()], "the shares are softmax(lses)"),
    (check_mended_sum, lambda outs, lses: torch.softmax(lses, 0)[:, None] * outs, "expected shape"),
]

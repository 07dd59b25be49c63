"""Wrong answers to the exercises of chapter 3, and what each must be told."""

from notebooks.checks.worked_example import check_blocks_of_gpu, check_mended_sum, check_token_two_after_round_two

WRONG_ANSWERS = [
    (check_blocks_of_gpu, 2, "not the kind of answer"),
    (check_blocks_of_gpu, [2, 3, 0, 1], "the other way"),
    (check_blocks_of_gpu, [0, 1, 2, 3], "its own block"),
    (check_token_two_after_round_two, (0.120, 4.243, 3.5), "rescale the old l"),
    (check_token_two_after_round_two, (1.0, 4.243, 1.480), "f is not 1.000"),
    (check_mended_sum, lambda outs, lses: outs.sum(0), "published sum"),
    (check_mended_sum, lambda outs, lses: outs.mean(0), "average of averages"),
    (check_mended_sum, lambda outs, lses: lses @ outs, "softmax(lses)"),
]

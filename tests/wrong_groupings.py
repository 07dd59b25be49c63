"""Rings that group the query heads wrongly. On each rank: with WRONG["head h uses K/V head h mod G"](): ..."""

from unittest import mock

from ringlab.training import grouped_query


def interleaved_fold(q, kv_heads):
    return q.unflatten(1, (-1, kv_heads)).transpose(1, 2).flatten(2, 3)


def interleaved_unfold(x, heads):
    return x.unflatten(2, (heads // x.shape[1], -1)).transpose(1, 2).flatten(1, 2)


def tokens_above_heads(q, kv_heads):
    """The rows of a group are put in order of token, but unfold expects them in order of head."""
    return q.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(2, 3)


WRONG = {
    "head h uses K/V head h mod G": lambda: mock.patch.multiple(
        grouped_query, fold=interleaved_fold, unfold=interleaved_unfold
    ),
    "folded and unfolded in another order": lambda: mock.patch.object(grouped_query, "fold", tokens_above_heads),
}

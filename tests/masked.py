"""What the tests of masks share: a mask by its words, and masks of all kinds."""

from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st

from ringlab.ring.layouts import LAYOUTS, Layout
from ringlab.ring.masks import Mask
from ringlab.ring.partition import Partition


def dense(mask, q_at, k_at):
    """The mask by its words: bool (queries, keys)."""
    q_at, k_at = q_at[:, None], k_at[None]
    seen = torch.ones(len(q_at), k_at.shape[1], dtype=torch.bool)
    if mask.documents is not None:
        numbers = torch.arange(len(mask.documents)).repeat_interleave(torch.tensor(mask.documents))
        seen &= numbers[q_at] == numbers[k_at]
    if mask.causal:
        seen &= k_at <= q_at
    if mask.window is not None:
        starts = [0, *accumulate(mask.documents or ())]
        begin = torch.tensor([max(start for start in starts if start <= at) for at in q_at.flatten().tolist()])
        seen &= (q_at - k_at < mask.window) | (k_at < begin[:, None] + mask.global_tokens)
    return seen


@st.composite
def masks(draw, world_size=None):
    """A mask, a layout and chunk lengths: a partition."""
    layout, P = draw(st.sampled_from((*LAYOUTS, PAIRS))), world_size or draw(st.integers(1, 8))
    if layout == "contiguous":
        lengths = draw(st.lists(st.integers(1, 12), min_size=P, max_size=P))
    else:
        lengths = [draw(st.integers(1, 6)) * 2] * P
    S, causal = sum(lengths), draw(st.booleans())
    ends = draw(st.none() | st.sets(st.integers(1, max(1, S - 1)), min_size=1, max_size=8)) if S > 1 else None
    documents = ends and [b - a for a, b in pairwise([0, *sorted(ends), S])]
    window = draw(st.none() | st.integers(1, S + 2)) if causal else None
    mask = Mask(causal, documents, window, draw(st.integers(0, S + 2)) if window else 0)
    return Partition(mask, layout, tuple(lengths))


def in_pairs_and_turned(seq_len, rank, world_size):
    """Pairs of tokens, dealt out from the last rank to the first."""
    return torch.arange(seq_len).view(-1, world_size, 2)[:, world_size - 1 - rank].flatten()


PAIRS = Layout("pairs, from the last rank on", in_pairs_and_turned, 2)

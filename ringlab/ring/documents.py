"""Documents packed into one sequence, and windows: masks that change the loss when a ring forgets them.

    the query at position p of document n sees the keys at    start(n) <= position <= p
    with a window w it sees the last w of these only, and the first g tokens of its document besides (global tokens)

A pack saves padding: short documents fill one sequence together. Attention must then stop at their boundaries. A ring
that forgets them raises no error, and with a single document it is right to the last bit. Four things restart with
each document: the keys that a query sees, positions, labels (the last token of a document has none), and the padding
at the end, which is one more document and counts in no loss. `pack` prepares all four for the whole sequence, before
`ringlab.positions` deals the tokens out.

The failure, on a model that needs no training: it looks up what followed the present token before. In one document a
comes after b, in the next c.

A window's keys lie in a rank's own block and in the blocks just before it. In the contiguous layout they are one, two,
... hops away: ceil((w - 1) / C). In the zigzag layout the second half of the chunks runs back, from rank P - 1 to rank
0: there the block just before is P - 1 hops away. In the striped layout the token n places back is n hops away. Global
tokens are a second run of keys: the computing stays small, but the first block must visit every rank.

Shapes: S tokens in all, P ranks, C = S/P. tokens, labels and positions are (S,), int64. q, k, v are (B, H, S, D).

    $ python -m ringlab.ring.documents
    documents of 6, 9 and 7 tokens, and 2 of padding, on 4 ranks
    each document alone: loss 0.8124
    boundaries forgotten: loss 1.4756, x 1.82
    positions that run on: loss 0.8771, x 1.08
    padding in the loss: loss 0.7744, x 0.95
    the ring, contiguous: loss 0.8124
    ok    out: largest error 4.4e-16, rounding allows 1.5e-14 (float64 sums)
    ...

Striped deals out each document evenly, so it needs no layout of its own for a pack. Contiguous chunks need the fewest
hops, and none where each document lies on one rank.

Before: flash_ring.py, the ring. After: all_gather.py, other ways than the ring.
Source: Krell et al. 2021, packing "without cross-contamination"; axolotl issue 3608: a ring that forgets the boundaries
has a loss of 5.81 where 3.17 is right; Beltagy et al. 2020 (Longformer), section 3.1, windows and global tokens; Xiao
et al. 2024 (StreamingLLM), section 3.2, attention sinks.
"""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.layouts import LAYOUTS, unshard
from ringlab.ring.masks import lengths_of

IGNORED = -100  # the label of a token that counts in no loss, as in F.cross_entropy


def document_positions(lengths: Sequence[int]) -> Tensor:
    """Where each token stands in its own document: 0, 1, ... from each document's start, (S,), int64."""
    return torch.cat([torch.arange(length) for length in lengths])


def document_lengths(cu_seqlens: Sequence[int] | Tensor) -> list[int]:
    """The lengths for `documents=` of the ring from FlashAttention's cu_seqlens: where documents begin, and S.

    cu_seqlens is a list or a tensor (documents + 1,) of whole numbers that begin at 0 and rise. Raises ValueError for
    anything else.
    """
    ends = lengths_of(cu_seqlens)
    if not isinstance(ends, tuple) or len(ends) < 2 or not all(type(n) is int for n in ends):
        raise ValueError(f"cu_seqlens is {ends!r}; expected a list or tensor (documents + 1,) of whole numbers")
    lengths = [end - begin for begin, end in pairwise(ends)]
    if ends[0] != 0 or min(lengths) < 1:
        n = lengths.index(min(lengths))
        raise ValueError(
            f"cu_seqlens begins with {ends[0]}, and document {n} goes from {ends[n]} to {ends[n + 1]}; expected 0, and "
            f"a token or more in each document"
        )
    return lengths


def pack(documents: Sequence[Tensor], multiple: int = 1) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Documents (n,), int64, one after the other, and zeros up to a multiple of `multiple` tokens.

    Returns tokens, labels and positions, each (S,), and the lengths for `documents=` of the ring: the padding is the
    last of them. Raises ValueError for no document, or an empty one.
    """
    if not documents or not all(len(document) for document in documents):
        raise ValueError(
            f"documents of {[len(document) for document in documents]} tokens; expected one or more, none empty"
        )
    lengths = [len(document) for document in documents]
    labels = [F.pad(document[1:], (0, 1), value=IGNORED) for document in documents]
    if padding := -sum(lengths) % multiple:
        documents, lengths = [*documents, torch.zeros(padding, dtype=torch.int64)], [*lengths, padding]
        labels.append(torch.full((padding,), IGNORED))
    return torch.cat(list(documents)), torch.cat(labels), document_positions(lengths), lengths


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of logits (S, vocabulary), over the tokens that have a label (S,)."""
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


SHARP = 4.0  # how sure the model is


def lookup(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, 1, S, 4) of a model that asks what followed the present token before; its logits are SHARP * out.

    A query is the token, a key the token before, a value the token. The first token of a document has no token before.
    """
    token = F.one_hot(tokens, 4).double()
    before = token.roll(1, dims=0) * (positions > 0)[:, None]
    query = 2 * SHARP * token  # the scores are divided by √D = 2
    return query[None, None], before[None, None], token[None, None]


def same_document(lengths: Sequence[int]) -> Tensor:
    """Which pairs are of one document: (S, S), bool."""
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return number[:, None] == number


def window_hops(window: int, chunk: int, world_size: int) -> int:
    """The hops of a causal window in the contiguous layout, with `chunk` tokens on each rank."""
    return min(-(-(window - 1) // chunk), world_size - 1)


DOCUMENTS = ("ababab", "bcbcbcbcb", "cacacac")


def letters(text: str) -> Tensor:
    """a, b, c as tokens 1, 2, 3; 0 is padding."""
    return torch.tensor([ord(letter) - ord("a") + 1 for letter in text])


def main() -> int:
    from ringlab.ring.cases import chunks_of_rank, report_ranks
    from ringlab.support.processes import launch
    from ringlab.support.rounding import exact_attention

    P, ok = 4, True
    texts = [letters(text) for text in DOCUMENTS]
    tokens, labels, at, lengths = pack(texts, 2 * P)
    print(f"documents of {lengths[0]}, {lengths[1]} and {lengths[2]} tokens, and {lengths[3]} of padding, on {P} ranks")

    def loss_of(x: tuple[Tensor, Tensor, Tensor], visible: Tensor | None, labels: Tensor) -> float:
        out = exact_attention(*x, causal=True, visible=visible)["out"].exact
        return mean_loss(SHARP * out[0, 0], labels).item()

    total = sum(
        (len(text) - 1) * loss_of(lookup(text, torch.arange(len(text))), None, F.pad(text[1:], (0, 1), value=IGNORED))
        for text in texts
    )
    alone = total / (labels != IGNORED).sum().item()
    print(f"each document alone: loss {alone:.4f}")
    inputs, visible = lookup(tokens, at), same_document(lengths)
    wrong = {
        "boundaries forgotten": loss_of(inputs, None, labels),
        "positions that run on": loss_of(lookup(tokens, torch.arange(len(tokens))), visible, labels),
        "padding in the loss": loss_of(inputs, visible, torch.where(at == 0, IGNORED, tokens).roll(-1)),
    }
    for name, loss in wrong.items():
        print(f"{name}: loss {loss:.4f}, x {loss / alone:.2f}")
        ok &= abs(loss - alone) > 0.01

    d_out = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right = exact_attention(*inputs, d_out, causal=True, visible=visible, fused_blocks=3 * P)
    ring = partial(ring_flash_attention, causal=True, documents=lengths)
    for layout in LAYOUTS:
        of_ranks = launch(chunks_of_rank, P, [*inputs, d_out], partial(ring, layout=layout), layout)
        out = unshard([chunks[0] for chunks in of_ranks], layout)
        loss = mean_loss(SHARP * out[0, 0], labels).item()
        print(f"the ring, {layout}: loss {loss:.4f}")
        ok &= abs(loss - alone) < 1e-12
        ok &= report_ranks(of_ranks, layout, right)

    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

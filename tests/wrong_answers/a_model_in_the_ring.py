"""Wrong answers to the exercises of chapter 10, and what each must be told."""

import torch
import torch.nn.functional as F

from notebooks.checks.a_model_in_the_ring import check_batch_loss, check_hops_of_a_step, check_rank_input
from ringlab.training.layouts import positions

IGNORED = -100


def rank_input(tokens=None, labels=None, positions_=None, layout="zigzag"):
    """The right answer with a part of it changed; each part is a function of (text, at, rank)."""

    def answer(text, rank, P):
        at = positions(layout, len(text) - 1, rank, P)
        parts = text[at], text[at + 1], at
        changed = zip((tokens, labels, positions_), parts, strict=True)
        return tuple(part if change is None else change(text, at, rank) for change, part in changed)

    return answer


def shares_out_the_whole_text(text, rank, P):
    at = positions("contiguous", len(text), rank, P)
    return text[at], text[at].roll(-1), at


def ignores_the_ends_of_pieces(text, at, rank):
    labels = text[at + 1].clone()
    labels[len(at) // 2 - 1] = IGNORED
    return labels


def right_for_even_P(text, rank, P):
    return rank_input(positions_=lambda text, at, rank: at + P % 2)(text, rank, P)


def losses(logits, labels, reduction="sum"):
    return [F.cross_entropy(x, y, reduction=reduction) for x, y in zip(logits, labels, strict=True)]


def real(labels):
    return sum((wanted != IGNORED).sum() for wanted in labels)


def without_empty_ranks(logits, labels):
    means = [mean for mean in losses(logits, labels, "mean") if not mean.isnan()]
    return sum(means) / len(means)


def counts_as_0(logits, labels):
    return sum(losses(logits, [wanted.clamp(min=0) for wanted in labels]))


def takes_minus_100_for_a_class(logits, labels):
    picked = [x.log_softmax(1).gather(1, y[:, None]).sum() for x, y in zip(logits, labels, strict=True)]
    return -sum(picked) / real(labels)


def of_rank_0(logits, labels):
    return sum(losses(logits, labels)) / (labels[0] != IGNORED).sum()


def hops(kv, gradients, again=1):
    """layers · (kv (P - 1) + what the gradients make), with `again` more turns of K and V when checkpointing."""
    return lambda P, layers, checkpointing: layers * ((kv + again * checkpointing) * (P - 1) + gradients(P))


WRONG_ANSWERS = [
    (check_rank_input, rank_input(labels=lambda text, at, rank: text[at].roll(-1)), "got a token of another piece"),
    (
        check_rank_input,
        rank_input(labels=lambda text, at, rank: F.pad(text[at][1:], (0, 1), value=IGNORED)),
        "its last token lost its label",
    ),
    (check_rank_input, rank_input(labels=lambda text, at, rank: text[at]), "yours are the tokens themselves"),
    (
        check_rank_input,
        rank_input(labels=lambda text, at, rank: text[(at + 2).clamp(max=len(text) - 1)]),
        "you shifted twice",
    ),
    (check_rank_input, rank_input(labels=lambda text, at, rank: text[(at - 1).clamp(min=0)]), "the wrong way"),
    (check_rank_input, rank_input(labels=ignores_the_ends_of_pieces), "the label of text[i] is text[i + 1]"),
    (
        check_rank_input,
        rank_input(positions_=lambda text, at, rank: torch.arange(len(at))),
        "you counted from 0 on this rank",
    ),
    (
        check_rank_input,
        rank_input(positions_=lambda text, at, rank: torch.arange(len(at)) + rank * len(at)),
        "you counted on from r · C",
    ),
    (check_rank_input, rank_input(positions_=lambda text, at, rank: at + 1), "off by one"),
    (check_rank_input, rank_input(positions_=lambda text, at, rank: at.flip(0)), "positions: off by up to"),
    (check_rank_input, right_for_even_P, "S = 30, P = 5, rank 4: positions: off by one"),
    (check_rank_input, rank_input(layout="contiguous"), "the tokens of the contiguous layout"),
    (check_rank_input, rank_input(layout="striped"), "the tokens of the striped layout"),
    (check_rank_input, rank_input(tokens=lambda text, at, rank: text[at + 1]), "yours begin with text[1]"),
    (check_rank_input, shares_out_the_whole_text, "in the tokens; expected those at places [6, 7, 8, 9]"),
    (check_rank_input, lambda text, rank, P: text, "expected 3 values (tokens, labels, positions), got 17 value(s)"),
    (check_batch_loss, lambda logits, labels: sum(losses(logits, labels, "mean")) / len(labels), "the ranks' means; a"),
    (check_batch_loss, lambda logits, labels: sum(losses(logits, labels, "mean")), "the sum of the ranks' means"),
    (check_batch_loss, lambda logits, labels: sum(losses(logits, labels)), "that is the sum; divide it"),
    (
        check_batch_loss,
        lambda logits, labels: sum(losses(logits, labels)) / sum(map(len, labels)),
        "you divided by all 12 tokens; 5 of them have no label",
    ),
    (check_batch_loss, of_rank_0, "divided by the labels of rank 0"),
    (check_batch_loss, without_empty_ranks, "the ranks' means; a"),
    (check_batch_loss, lambda logits, labels: counts_as_0(logits, labels) / sum(map(len, labels)), "as label 0"),
    (check_batch_loss, lambda logits, labels: counts_as_0(logits, labels) / real(labels), "as label 0"),
    (check_batch_loss, takes_minus_100_for_a_class, "your answer ends in"),
    (
        check_batch_loss,
        lambda logits, labels: (
            sum((y != IGNORED).sum() * x for x, y in zip(losses(logits, labels, "mean"), labels, strict=True))
            / real(labels)
        ),
        "4 rank(s) with 2, 0, 3, 3 labels: a rank without labels has no mean",
    ),
    (check_batch_loss, lambda logits, labels: 1.001 * sum(losses(logits, labels)) / real(labels), "off by up to"),
    (check_batch_loss, lambda logits, labels: losses(logits, labels), "expected shape (), got (3,)"),
    (check_hops_of_a_step, hops(2, lambda P: P - 1), "P hops, not P - 1"),
    (check_hops_of_a_step, hops(2, lambda P: 0), "dK and dV travel too"),
    (check_hops_of_a_step, hops(1, lambda P: 0), "the forward pass only"),
    (check_hops_of_a_step, lambda P, layers, c: hops(2, lambda P: P)(P, 1, c), "that is one layer"),
    (check_hops_of_a_step, hops(2, lambda P: P, again=0), "with checkpointing K and V go round once more"),
    (check_hops_of_a_step, hops(3, lambda P: P, again=0), "without checkpointing K and V go round twice"),
    (check_hops_of_a_step, lambda P, layers, c: layers * (4 if c else 3) * P, "begins with its own block"),
    (check_hops_of_a_step, lambda P, layers, c: layers * (2 if c else 1) * (3 * P - 2), "the gradients travel once"),
    (check_hops_of_a_step, lambda P, layers, c: 13 if c else 10, "wrong in 4 of 6 cases"),
    (check_hops_of_a_step, lambda P, layers, c: "13", "expected a number"),
    (check_rank_input, rank_input(labels=lambda text, at, rank: text.roll(1)[at]), "the wrong way"),
    (check_rank_input, rank_input(labels=lambda text, at, rank: text[:-1].roll(1)[at]), "the wrong way"),
    (check_rank_input, rank_input(labels=lambda text, at, rank: text[at].roll(1)), "the wrong way"),
    (
        check_rank_input,
        rank_input(labels=lambda text, at, rank: F.pad(text, (1, 0), value=IGNORED)[at]),
        "the wrong way",
    ),
    (check_rank_input, lambda *given: rank_input()(*given)[::-1], "another order, positions, labels, tokens"),
    (check_rank_input, lambda *given: [rank_input()(*given)[i] for i in (1, 0, 2)], "order, labels, tokens, positions"),
    (check_batch_loss, lambda logits, labels: "1.5", "expected a number, got str"),
    (check_batch_loss, lambda logits, labels: -sum(losses(logits, labels)) / real(labels), "off by up to"),
]

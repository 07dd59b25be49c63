"""Wrong answers to the exercises of chapter 12, and what each must be told."""

import torch
import torch.nn.functional as F

from notebooks.checks.your_own_model import check_attention_function, check_shard_by_hand, check_what_is_refused
from ringlab.training.layouts import positions


def right_attention(ring, q, k, v, scaling):
    return ring(q, k, v, scale=scaling).transpose(1, 2), None


def repeated(ring, q, k, v, scaling):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return right_attention(ring, q, k, v, scaling)


def reshaped(ring, q, k, v, scaling):
    B, H, C, D = q.shape
    return ring(q, k, v, scale=scaling).reshape(B, C, H, D), None


def own_attention(ring, q, k, v, scaling):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2), None


def twice_called(ring, q, k, v, scaling):
    ring(q, k, v)
    return right_attention(ring, q, k, v, scaling)


def scaled_twice(ring, q, k, v, scaling):
    return right_attention(ring, q * (scaling or q.shape[-1] ** -0.5), k, v, None)


def shard(tokens, labels, rank, P, *, layout="zigzag", mistake=""):
    at = positions(layout, tokens.shape[1], rank, P)
    target = F.pad(labels[:, 1:], (0, 1), value=-100)
    count, place = (target != -100).sum(), at[None]
    mine = target[:, at]
    if mistake == "labels shifted in the shard":
        mine = F.pad(labels[:, at][:, 1:], (0, 1), value=-100)
    if mistake == "not shifted":
        mine = labels[:, at]
    if mistake == "rolled":
        mine = labels.roll(-1, 1)[:, at]
    if mistake == "the wrong way":
        mine = F.pad(labels[:, :-1], (1, 0), value=-100)[:, at]
    if mistake == "rolled the wrong way":
        mine = labels.roll(1, 1)[:, at]
    if mistake == "the wrong way in the shard":
        mine = labels[:, at].roll(1, 1)
    if mistake == "zeros":
        mine = 0 * mine
    if mistake == "counted here":
        place = torch.arange(len(at))[None]
    if mistake == "rC":
        place = place * 0 + rank * len(at) + torch.arange(len(at))
    if mistake == "other place":
        place = place + 1
    if mistake == "no axis":
        place = at
    if mistake == "own count":
        count = (mine != -100).sum()
    if mistake == "count before":
        count = (labels != -100).sum()
    if mistake == "tokens":
        count = tokens.numel()
    return tokens[:, at], mine, place, count


def mistaken(mistake):
    return lambda *batch: shard(*batch, mistake=mistake)


def all_passed(passed):
    return sorted(passed)


def not_none(passed):
    return sorted(name for name, x in passed.items() if x is not None)


def truthy(passed):
    return sorted(name for name, x in passed.items() if x)


def known(passed):
    names = {"sliding_window", "softcap", "dropout", "attention_mask", "s_aux", "cu_seq_lens_q", "max_length_q"}
    lost = [name for name in understood(passed) if name in names]
    return [*lost, *(["is_causal"] if passed.get("is_causal") is False else [])]


def understood(passed, names=("scaling", "position_ids", "is_causal")):
    rest = {name: x for name, x in passed.items() if name not in names and x is not None}
    return [name for name, x in rest.items() if isinstance(x, torch.Tensor) or x != 0]


def refuses_none(passed):
    lost = [name for name in understood(passed) if name != "is_causal"]
    return [*lost, *(["is_causal"] if not passed.get("is_causal", True) else [])]


def all_names_of_the_chapter(passed):
    return known(passed)


def all_names_that_the_check_has(passed):
    lost = [name for name in understood(passed) if name == "position_bias"]
    return [*known(passed), *lost]


def not_zero(passed):
    """Zeros in a tensor are taken for nothing."""
    return [name for name in understood(passed) if not isinstance(passed[name], torch.Tensor) or passed[name].any()]


WRONG_ANSWERS = [
    (check_attention_function, lambda ring, q, k, v, scaling: (ring(q, k, v, scale=scaling), None), "as it leaves the"),
    (check_attention_function, lambda ring, q, k, v, scaling: (ring(q, k, v).transpose(1, 2), None), "not passed on"),
    (check_attention_function, scaled_twice, "scaled twice"),
    (check_attention_function, repeated, "K and V have 2 heads, and you send 4"),
    (check_attention_function, reshaped, "mixes heads and tokens"),
    (check_attention_function, own_attention, "was not called"),
    (check_attention_function, twice_called, "called 2 times"),
    (check_attention_function, lambda *given: (2 * right_attention(*given)[0], None), "off by"),
    (check_attention_function, lambda *given: (right_attention(*given)[0],) * 2, "return None in its place"),
    (check_attention_function, lambda *given: right_attention(*given)[0], "expected 2 values (out, weights)"),
    (check_shard_by_hand, lambda *batch: shard(*batch, layout="contiguous"), "that is the contiguous layout"),
    (check_shard_by_hand, lambda *batch: shard(*batch, layout="striped"), "expected the tokens at [0, 1, 14, 15]"),
    (check_shard_by_hand, mistaken("labels shifted in the shard"), "shifted inside the shard"),
    (check_shard_by_hand, mistaken("not shifted"), "not shifted"),
    (check_shard_by_hand, mistaken("rolled"), "the last token has no label"),
    (check_shard_by_hand, mistaken("zeros"), "then take yours"),
    (check_shard_by_hand, mistaken("counted here"), "counted from 0 or rC on"),
    (check_shard_by_hand, mistaken("rC"), "counted from 0 or rC on"),
    (check_shard_by_hand, mistaken("other place"), "where the tokens stand in the whole sequence"),
    (check_shard_by_hand, mistaken("no axis"), "an axis for the batch"),
    (check_shard_by_hand, mistaken("own count"), "those are the labels of this rank"),
    (check_shard_by_hand, mistaken("count before"), "counted before the shift"),
    (check_shard_by_hand, mistaken("tokens"), "what is not -100"),
    (check_shard_by_hand, lambda *batch: shard(*batch)[:2], "expected 4 values"),
    (check_what_is_refused, all_passed, "attention_mask is None, so nothing is lost"),
    (check_what_is_refused, not_none, "dropout is 0.0, so nothing is lost"),
    (check_what_is_refused, lambda passed: [*understood(passed), "scaling"], "the ring takes scaling"),
    (check_what_is_refused, lambda passed: [*understood(passed), "dropout"], "dropout is 0.0"),
    (check_what_is_refused, lambda passed: [*understood(passed), "window"], "it was not passed"),
    (check_what_is_refused, truthy, "ends in RuntimeError"),
    (check_what_is_refused, lambda passed: [], "you accept sliding_window: the ring would drop it"),
    (check_what_is_refused, not_zero, "a sink of 0 is a sink"),
    (check_what_is_refused, understood, "asks for both directions"),
    (check_what_is_refused, known, "no list of what is wrong is complete"),
    (check_what_is_refused, lambda passed: "dropout", "expected a list of names"),
    (check_shard_by_hand, mistaken("the wrong way"), "shifted the wrong way"),
    (check_shard_by_hand, mistaken("rolled the wrong way"), "shifted the wrong way"),
    (check_shard_by_hand, mistaken("the wrong way in the shard"), "shifted the wrong way"),
    (check_shard_by_hand, lambda *batch: (*shard(*batch)[:3], "all"), "expected a number, got str"),
    (check_what_is_refused, lambda passed: {"dropout": True}, "expected a list of names, got dict"),
    (check_what_is_refused, lambda passed: [1], "expected a list of names, got [1]"),
    (check_what_is_refused, lambda passed: ["scaling", "dropout"], "the ring takes scaling"),
    (check_what_is_refused, refuses_none, "is_causal is None, so nothing is lost"),
    (check_what_is_refused, all_names_of_the_chapter, "no list of what is wrong is complete"),
    (check_what_is_refused, all_names_that_the_check_has, "the ring would drop it"),
]

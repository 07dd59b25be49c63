"""Wrong answers to the exercises of chapter 8, and what each must be told."""

import math

import torch

from notebooks.checks.the_fused_ring import check_attention_on_a_kernel, check_merging_share, check_natural_lse


def outs_of(kernel, q, k, v, blocks):
    return [kernel(q, k_j, v_j)[0] for k_j, v_j in zip(k.chunk(blocks), v.chunk(blocks), strict=True)]


def merged(kernel, q, blocks, total=torch.logaddexp):
    """Right, for a list of blocks and with `logaddexp`."""
    out, lse = kernel(q, *blocks[0])
    for block in blocks[1:]:
        out_j, lse_j = kernel(q, *block)
        out, lse = out.lerp(out_j, torch.sigmoid(lse_j - lse)[:, None]), total(lse, lse_j)
    return out


def blocks_of_four(kernel, q, k, v, blocks):
    return merged(kernel, q, [(k[i : i + 4], v[i : i + 4]) for i in range(0, 4 * (len(k) // 4), 4)])


def overflowing(kernel, q, k, v, blocks):
    pairs = list(zip(k.chunk(blocks), v.chunk(blocks), strict=True))
    return merged(kernel, q, pairs, lambda a, b: torch.log(a.exp() + b.exp()))


def forgetful(kernel, q, k, v, blocks):
    return merged(kernel, q, list(zip(k.chunk(blocks), v.chunk(blocks), strict=True)), lambda lse, lse_j: lse_j)


def natural(factor, out_factor=1.0):
    """An answer that multiplies every lse by the factor, whatever the kernel."""

    def answer(kernel, q, k, v):
        out, lse = kernel(q, k, v)
        return out_factor * out, factor * lse

    return answer


def asks_about_score_0(kernel, q, k, v):
    zero = torch.zeros(1, 1)
    base_2 = kernel(zero, zero, zero)[1].item() > 0.5
    out, lse = kernel(q, k, v)
    return out, lse * math.log(2) if base_2 else lse


def mends_out_too(kernel, q, k, v):
    one = torch.ones(1, 1)
    factor = 1 / kernel(one, one, one)[1]
    out, lse = kernel(q, k, v)
    return factor * out, factor * lse


def right_for_four_numbers(kernel, q, k, v):
    one = torch.ones(1, q.shape[1])  # the score is √D, and so is the natural lse
    factor = 2 / kernel(one, one, one)[1]
    out, lse = kernel(q, k, v)
    return out, factor * lse


def own_attention(kernel, q, k, v, blocks):
    """Calls the kernel, and computes by itself."""
    outs_of(kernel, q, k, v, blocks)
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]), dim=1) @ v


def right_natural(kernel, q, k, v):
    one = torch.ones(1, 1)
    out, lse = kernel(q, k, v)
    return out, lse / kernel(one, one, one)[1]


def in_turn():
    """Knows in which order the kernels come."""
    calls = []

    def answer(kernel, q, k, v):
        calls.append(kernel)
        out, lse = kernel(q, k, v)
        return out, lse if len(calls) % 2 else lse * math.log(2)

    return answer


WRONG_ANSWERS = [
    (check_merging_share, lambda lse, lse_j: torch.sigmoid(lse - lse_j), "merged before"),
    (check_merging_share, lambda lse, lse_j: lse_j.exp(), "divide by the sum"),
    (check_merging_share, lambda lse, lse_j: (lse_j - lse).exp(), "that is e^lse_j / e^lse"),
    (
        check_merging_share,
        lambda lse, lse_j: lse_j.exp() / (lse.exp() + lse_j.exp()),
        "lse near 1000: e^1000 overflows",
    ),
    (check_merging_share, lambda lse, lse_j: 1 / (1 + (lse.clamp(max=80) - lse_j).exp()), "lse near 1000"),
    (check_merging_share, lambda lse, lse_j: lse_j - lse, "e^lse_j / (e^lse + e^lse_j)"),
    (check_merging_share, lambda lse, lse_j: 1.01 * torch.sigmoid(lse_j - lse), "off by up to"),
    (check_merging_share, lambda lse, lse_j: torch.sigmoid(lse_j - lse)[:3], "expected shape (7,), got (3,), with 7"),
    (check_merging_share, lambda lse, lse_j: 0.5, "expected shape (3,), got ()"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: kernel(q, k, v)[0], "kernel saw [12] keys; expected 3"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: sum(outs_of(kernel, q, k, v, n)) / n, "the average"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: sum(outs_of(kernel, q, k, v, n)), "the sum of"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: outs_of(kernel, q, k, v, n)[0], "after each merge"),
    (check_attention_on_a_kernel, forgetful, "after each merge"),
    (check_attention_on_a_kernel, blocks_of_four, "S = 10, 4 block(s): off by"),
    (check_attention_on_a_kernel, overflowing, "S = 20, 5 block(s), large scores"),
    (check_natural_lse, natural(math.log(2)), "natural: it was natural already"),
    (check_natural_lse, natural(1.0), "in base 2: you return it as it came"),
    (check_natural_lse, asks_about_score_0, "in base 2: you return it as it came"),
    (check_natural_lse, right_for_four_numbers, "S = 3, D = 2, a kernel whose lse is natural: off by"),
    (check_natural_lse, mends_out_too, "in base 2: off by"),
    (check_natural_lse, natural(1.0, out_factor=1.01), "natural: off by"),
    (check_natural_lse, lambda kernel, q, k, v: kernel(q, k, v)[1], "expected 2 values (out, lse), got 6 value(s)"),
    (check_natural_lse, lambda kernel, q, k, v: (*kernel(q, k, v), 0), "got 3 value(s)"),
    (check_merging_share, lambda lse, lse_j: torch.tensor([0.5, 0.880797, 0.37754]), "with 7 queries"),
    (check_merging_share, lambda lse, lse_j: torch.sigmoid((lse_j - lse).clamp(-2, 2)), "with 7 queries"),
    (check_attention_on_a_kernel, own_attention, "not the attention of the kernel"),
    (check_attention_on_a_kernel, lambda kernel, q, k, v, n: kernel(q, k, v), "expected"),
    (check_natural_lse, lambda *given: right_natural(*given)[::-1], "another order, lse, out: return out, lse"),
    (check_natural_lse, natural(1 / math.log(2)), "natural: it was natural already"),
    (check_natural_lse, in_turn(), "lse is"),
]

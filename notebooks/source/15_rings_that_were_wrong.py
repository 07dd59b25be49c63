# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15 · Rings that were wrong
#
# A wrong ring seldom stops: the loss falls, and the tests pass. Here are five mistakes of public
# libraries: the symptom, your guess, the cause. After this chapter you can
#
# - read the [X-ray](../docs/glossary.md#x-ray) of a ring: which weights it used, rank by rank and
#   [block](../docs/glossary.md#block) by block,
# - say from the wrong results where in the ring the mistake must be,
# - choose tests that these mistakes do not pass.
#
# Track *check*. You need chapters 1 to 8; the track ends here. 24 minutes to read, 15 for the exercises.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# %matplotlib inline
import math
import textwrap
from dataclasses import replace

import torch

from notebooks.source.checks.rings_that_were_wrong import (
    LIST,
    SICK,
    check_new_mistake,
    check_xrays,
    first,
    names_of,
    print_row,
    xray_of_ring,
)
from ring_doctor.asking.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.xray import XRay, on_paper
from ring_doctor.explaining.xray_picture import picture
from ring_doctor.mistakes.paper_ring import RIGHT, compute

# %% [markdown]
# ## The failure
#
# diffusers 0.42.1 has a ring for training. Here is the loop of its
# [backward pass](../docs/glossary.md#backward-pass), played in one process: each list has an item for each
# [rank](../docs/glossary.md#rank), and `block_gradients` is that of chapter 5.


# %%
def block_gradients(q, k, v, d_out, lse, delta):
    """What the queries of one rank and the keys of one block add to dq, dk and dv."""
    scale = q.shape[-1] ** -0.5
    p = torch.exp(scale * q @ k.mT - lse)
    ds = p * (d_out @ v.mT - delta)
    return scale * ds @ k, scale * ds.mT @ q, p.mT @ d_out


def ring_gradients(q, k, v, d_out, P):
    """dq, dk and dv, (S, D) each, on P ranks; lse and delta are those of the whole row."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    lse = scores.logsumexp(dim=-1, keepdim=True)
    delta = (d_out * (scores.softmax(dim=-1) @ v)).sum(dim=-1, keepdim=True)
    q, k, v, d_out, lse, delta = (x.chunk(P) for x in (q, k, v, d_out, lse, delta))
    dq, dk, dv = ([torch.zeros_like(chunk) for chunk in q] for _ in range(3))
    for i in range(P):
        for r in range(P):
            j = (r + i) % P  # K and V in hand are those of rank r + i
            of_q, of_k, of_v = block_gradients(q[r], k[j], v[j], d_out[r], lse[r], delta[r])
            dq[r], dk[r], dv[r] = dq[r] + of_q, dk[r] + of_k, dv[r] + of_v
        dk, dv = dk[-1:] + dk[:-1], dv[-1:] + dv[:-1]  # the sums in hand go to rank r + 1
    return [torch.cat(parts) for parts in (dq, dk, dv)]


# %% [markdown]
# The library's own test runs two ranks, and asks whether all gradients are finite. You ask more: how large is the
# error of each gradient in norm, as a share of the right gradient, in float64?

# %%
S, D = 24, 4
q, k, v, d_out = torch.randn(4, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
out = torch.softmax(leaves[0] @ leaves[1].mT * D**-0.5, dim=-1) @ leaves[2]
exact = torch.autograd.grad(out, leaves, d_out)

print("ranks   finite   error of dq       dk       dv")
off = {}
for P in (1, 2, 3, 4):
    found = ring_gradients(q, k, v, d_out, P)
    off[P] = [((x - right).norm() / right.norm()).item() for x, right in zip(found, exact, strict=True)]
    words = ["exact" if error < 1e-14 else f"{100 * error:.0f} %" for error in off[P]]
    finite = all(x.isfinite().all() for x in found)
    print(f"{P:>5}   {'yes' if finite else 'no':<6}" + "".join(f"{word:>9}" for word in words))
assert max(off[1] + off[2]) < 1e-14
assert all(off[P][0] < 1e-14 and min(off[P][1:]) > 0.1 for P in (3, 4))

# %% [markdown]
# We ran the library's class itself, unmodified, in float64, and saw the same pattern
# ([report](../ring_doctor/patients/findings/README.md#diffusers)). Which line of the loop is wrong?
#
# <details><summary>Guess first. Then open.</summary>
#
# The last line. K and V come from rank $r+1$, so blocks move towards smaller ranks. The sums of dK and dV move towards
# larger ranks, and meet other blocks. With two ranks, $r + 1$ and $r - 1$ are the same rank.
# </details>
#
# ## The idea: an X-ray
#
# An error of 64 % says *that* a ring is wrong, not *where*. But attention is a product with one matrix, the
# [weights](../docs/glossary.md#weights) $W$, $(S, S)$. **Give the identity matrix $I$ for $V$, with $D = S$. Then the output
# is the matrix.** In the backward pass $dO$ does the same:
#
# $$\text{out} = W V, \quad V = I \;\Rightarrow\; \text{out} = W \qquad\qquad
# dV = W^\top dO, \quad dO = I \;\Rightarrow\; dV = W^\top$$
#
# Nobody needs to look inside the ring. Ten lines take this X-ray of the loop above, by $dV$, for 8 tokens on 4 ranks. For
# each tile (the queries of a rank, the keys of a block) they ask whose weights it holds:

# %%
S, P = 8, 4
q, k = torch.randn(2, S, S, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
one = torch.eye(S, dtype=torch.float64)
right = torch.softmax(q @ k.mT * S**-0.5, dim=-1)
_, _, dv = ring_gradients(q, k, one, one, P)
by_tiles = (w.unflatten(0, (P, -1)).unflatten(2, (P, -1)).transpose(1, 2) for w in (dv.mT, right))
shown, wanted = by_tiles  # (P, P, C, C) each: [rank, block]

print("weights in the place of    KV0   KV1   KV2   KV3")
for r in range(P):
    holds = [j for tile in shown[r] for j in range(P) if torch.allclose(tile, wanted[r, j])]
    print(f"rank {r} has those of      " + "".join(f"{f'KV{j}':>6}" for j in holds))
    assert holds == [j if (j - r) % 2 == 0 else (j + 2) % P for j in range(P)]

# %% [markdown]
# Every other tile holds what belongs two blocks further, and that points to the cause. In each round a block moves by
# one rank, and its sums by one rank the other way, so after one round they are two ranks apart, after two rounds
# four. With 4 ranks, four apart is together again.
#
# `ring_doctor/explaining/xray.py` does this for any ring. Here is
# its picture of the same mistake. A ring computes its weights twice, forward and backward, and the two can differ.


# %%
def weights_of(xray: XRay) -> XRay:
    """The two matrices of weights alone."""
    return XRay(xray.matrices[:2], xray.case)


def show(xray: XRay) -> None:
    """The weights of an X-ray as text, in lines that fit the page."""
    for line in weights_of(xray).text().splitlines():
        print(textwrap.fill(line, 96, subsequent_indent="    "))


TINY = Case(4, 8)  # 4 ranks, 8 tokens
travel = first("gradients_travel_other_way")
xray = on_paper(TINY, travel(RIGHT))
assert [matrix.ok for matrix in xray.matrices] == [True, False, True, False]  # out, dV, dQ, dK
picture(weights_of(xray), "Gradients that travel the other way")

# %% [markdown]
# ## How a mistake gets its name
#
# `on_paper` took the X-ray of a [ring on paper](../docs/glossary.md#ring-on-paper): all ranks in one process, in float64, in small
# steps. **A mistake is a function that replaces a step.** One of the steps is `home`: what the queries of a rank add to dK and dV of a
# block must end on the rank where the block began. The mistake of diffusers replaces it: rank r meets block j after r − j hops, so the
# sums would have to go r − j ranks back. They go r − j ranks *further*, to rank 2r − j. (The loop above sends blocks and sums the other
# way round; its sums end on the same rank.) The doctor has a row for each mistake: its name, and the step with what replaces it. A page
# says [what such a ring does, where to look, and who had it](../ring_doctor/mistakes/README.md#gradients_travel_other_way).

# %%
print_row("gradients_travel_other_way")

# %% [markdown]
# All entries together are the catalogue. So the doctor can compute what a ring *with* each mistake would return, and
# **it names the mistake whose numbers are those of the ring that it tests**, in every question that it asked. Try it: does the
# ring on paper return the numbers of our loop?

# %%
case = Case(3, 12, heads=1, kv_heads=1)
q, k, v, d_out = (x[0, 0] for x in case.whole())
returned = compute(case, travel(RIGHT))
for name, x in zip(("dq", "dk", "dv"), ring_gradients(q, k, v, d_out, 3), strict=True):
    assert torch.allclose(returned[name][0, 0], x, rtol=0, atol=1e-12)
print("the ring on paper returns the numbers of our loop")
named = names_of(travel)
print("our loop has:", *named)
assert named == ["gradients_travel_other_way"]
assert len(CATALOGUE) >= 40

# %% [markdown]
# Now you are the doctor. In each of three more cases, guess before you open.
#
# ## One fifth of the attention
#
# A server computes attention over 3,072 old tokens and over 64 new ones, and merges both. The new tokens should get
# 2.03 % of the weight. They get 0.37 % ([sglang, issue 40903](https://github.com/sgl-project/sglang/issues/40903)). The
# weights still sum to 1. What is wrong in the merge?
#
# <details><summary>Guess first. Then open.</summary>
#
# The kernel's [log-sum-exp](../docs/glossary.md#log-sum-exp) is a logarithm to base 2, and the merge takes it for a natural
# one. So all differences of lse are $1/\ln 2 = 1.4427$ times too large, and what has little weight gets less.
# [flashinfer's](https://github.com/flashinfer-ai/flashinfer/issues/2113) kernels return base 2;
# [vllm](https://github.com/vllm-project/vllm/pull/28840) had the mistake too.
# </details>

# %%
share = 0.020326  # of the new tokens, from the thread
difference = math.log(share / (1 - share))  # lse of the new ones - lse of the old ones
merged = 1 / (1 + math.exp(-difference / math.log(2)))
print(f"the new tokens should get {100 * share:.2f} %, and get {100 * merged:.2f} %")
assert f"{100 * merged:.2f}" == "0.37"

xray = on_paper(TINY, first("base_2_as_natural")(RIGHT))
assert xray.matrices[0].sums is None  # every row sums to 1, so a look at the sums finds nothing

# %% [markdown]
# *What would have caught it:* the merged output beside full attention, in float64. In bfloat16 an error of some percent
# may pass for rounding.
#
# ## The loss is 1.83 times as high
#
# The first loss of a training run is 3.17 on one rank and 5.81 on two. Each sequence has five documents; with one
# document both losses are equal ([axolotl, issue 3608](https://github.com/axolotl-ai-cloud/axolotl/issues/3608)). Another
# library trained models with a sliding window, and their loss looked plausible
# ([accelerate, pull request 4177](https://github.com/huggingface/accelerate/pull/4177)). What do the two have in common?
#
# <details><summary>Guess first. Then open.</summary>
#
# Each drops a mask without a word, one the borders of the documents and the other the window. Then both rings compute causal
# attention over everything that came before.
# </details>

# %%
packed = replace(TINY, causal=True, documents=(3, 5))
forgets = on_paper(packed, first("documents_ignored")(RIGHT))

picture(weights_of(forgets), "Documents of 3 and 5 tokens, and a ring that ignores them")

# %% [markdown]
# "leak 4" says that the tile has 4 pairs that the mask hides, and "mask" that the tile has the pairs of another mask. *What would have
# caught it:* a test for each mask that the function accepts, with more than one document and a window shorter than the
# sequence. A ring that cannot do a mask must refuse it.
#
# ## dV is exact, dQ and dK are not
#
# A ring has two chunks of four keys. Its forward pass is exact, and so is dV. But dQ is off by 9.6 %, and dK by 14.2 % ([tt-metal,
# issue 53205](https://github.com/tenstorrent/tt-metal/issues/53205), by its own reproduction). A backward pass gets two numbers for
# each query, lse and [δ](../docs/glossary.md#delta). Which of them is wrong?
#
# <details><summary>Guess first. Then open.</summary>
#
# δ. The weights come from the lse alone, and $dV = W^\top dO$ needs nothing else. dV is exact, so the weights are
# right, and so is the lse. $dS = W \circ (dP - \delta)$ needs δ, and dQ and dK need $dS$. That ring took δ from the
# output of each block, not from the output of the whole row.
# </details>

# %%
print("wrong results, on 3 ranks, without a mask")
case = Case(3, 12)
exact = compute(case)
symptoms = {}
for mistake in ("delta_of_the_block", "lse_of_the_block"):
    found = compute(case, first(mistake)(RIGHT))
    symptoms[mistake] = [name for name, x in found.items() if not torch.allclose(x, exact[name])]
    print(f"{mistake:<20}", *symptoms[mistake])
assert list(symptoms.values()) == [["dq", "dk"], ["dq", "dk", "dv"]]

# %% [markdown]
# *What would have caught it:* each gradient compared by itself. There were tests, but they passed a mask that the
# operator refuses, and so ended before they compared anything
# ([pull request 53216](https://github.com/tenstorrent/tt-metal/pull/53216)). **A test that never failed proves
# nothing: plant a mistake, and see it fail.**
#
# ## Which test sees which mistake?
#
# Here are the five mistakes and five tests. The first test asks whether out and the gradients are finite. "All" compares out and
# every gradient by itself. The last test asks for each mask that the function takes.

# %%
FIVE = {
    "gradients_travel_other_way": {},
    "base_2_as_natural": {},
    "documents_ignored": {"causal": True, "documents": (5, 7)},
    "window_ignored": {"causal": True, "window": 3},
    "delta_of_the_block": {},
}
ALL = ("out", "dq", "dk", "dv")
TESTS = {  # the ranks, the results that are compared, and whether masks are asked for
    "2, finite": (2, (), False),
    "2, out": (2, ("out",), False),
    "2, all": (2, ALL, False),
    "3, all": (3, ALL, False),
    "3, all, masks": (3, ALL, True),
}


def sees(test, name):
    """Whether a test rejects a ring with this mistake."""
    P, compared, masks = TESTS[test]
    case = Case(P, 12, **(FIVE[name] if masks else {}))
    found, exact = compute(case, CATALOGUE[name].variants[0](RIGHT)), compute(case)
    finite = all(found[each].isfinite().all() for each in ALL)
    return not finite or any(not torch.allclose(found[each], exact[each]) for each in compared)


print("ranks, and what is compared" + "".join(f"{test:>14}" for test in TESTS))
seen = {name: [sees(test, name) for test in TESTS] for name in FIVE}
for name, row in seen.items():
    print(f"{name:<27}" + "".join(f"{'found' if found else '-':>14}" for found in row))
assert [sum(column) for column in zip(*seen.values(), strict=True)] == [0, 1, 2, 3, 5]

# %% [markdown]
# So test in float64 first, because rounding hides mistakes. Take 3 ranks too, compare every gradient by itself, and
# ask for every mask that the ring claims.
#
# ## A real ring
#
# The doctor does not read code. It calls your function on 1 to 5 real processes, and compares the answers with those of
# every entry: `ring-doctor my_package.ring:attention` ([what it prints](../README.md#you-have-a-ring-already-let-the-doctor-see-it)). In a test, write
# `ring_doctor.assert_ring(attention)`. Write a ring of your own in the [workshop](your_ring/your_ring.ipynb), and see it
# examined after each step.
#
# > **One number to remember: 3 ranks.** With 2 the next rank is also the previous one, and some mistakes cannot show.
#
# ## Questions
#
# <details><summary>A ring's loss agrees with that of one process to four digits. Is its attention right?</summary>
#
# Not for sure. At the start of training the loss hardly depends on attention. And two of the five mistakes
# leave the output exact and spoil only gradients.
# </details>
#
# <details><summary>Each hop moves the blocks by two ranks, without a mask. With how many ranks does it show?</summary>
#
# It shows with even numbers only. With 2 ranks each rank meets its own block twice, and with 4 ranks two blocks twice. With 3
# ranks two steps forward are one step back, so all blocks come, in another order. So 3 ranks alone are not enough either: test
# with 1, 2, 3 and 4.
# </details>
#
# ## Your turn
#
# **Five sick rings**, on 4 ranks with 2 tokens each. D has a causal mask and the
# [zigzag layout](../docs/glossary.md#zigzag-layout), and the others have no mask. "twice" says that the weights of a tile count twice,
# "is KV2" that it holds what belongs to block 2, and "x 1.5-1.6" that its weights are 1.5 to 1.6 times the right ones. The names to
# choose from stand below the X-rays.

# %%
for letter in SICK:
    print(f"\nRING {letter}")
    show(xray_of_ring(letter))


# %%
def explain(names):
    """What each mistake is, by the catalogue."""
    for name in names:
        print(textwrap.fill(f"{name:<28}{CATALOGUE[name].what}", 96, subsequent_indent=" " * 28))


explain(LIST)

# %%
# The mistake of each ring, from the list: a string in the place of each ...
my_names = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ...}

print(check_xrays(my_names))


# %%
# A mistake that the doctor does not know: return replace(steps, name=function), by dataclasses.replace.
# The names of the steps and their arguments are in ring_doctor/mistakes/paper_ring.py.
def my_mistake(steps):
    return ...


print(check_new_mistake(my_mistake))

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# from dataclasses import replace
#
# my_names = {
#     "A": "stale_first_block",
#     "B": "gradients_not_sent_home",
#     "C": "averages_averaged",
#     "D": "chunk_index_under_zigzag",
#     "E": "lse_of_the_block",
# }
#
# def my_mistake(steps):  # q and k are each multiplied by D^(-1/4), as in some kernels, and here k was forgotten
#     return replace(steps, scale=lambda case: case.head_dim**-0.25)
# ```
# </details>
#
# Open [`paper_ring.py`](../ring_doctor/mistakes/paper_ring.py) now: the steps that a mistake replaces.
# [`xray.py`](../ring_doctor/explaining/xray.py) makes the X-ray. What the doctor found in public rings:
# [ring_doctor/patients/findings](../ring_doctor/patients/findings/README.md).

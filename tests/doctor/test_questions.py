"""What the doctor asks, and how it judges: each question is there, and each way to be wrong is seen, but no other.

The inputs for sums in 16 bits are tried on paper and by real rings, right ones and wrong ones.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ring_doctor.asking import examination
from ring_doctor.asking.answers import FAILED, OK, REFUSED, WRONG, Examination, judge, right_results
from ring_doctor.asking.calls import RankResults
from ring_doctor.asking.case import UNROUNDED, Case
from ring_doctor.asking.examination import PRODUCTS, compared_under_autocast, in_turn
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import LSE, WAYS, Question, kind, questions
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ring.latent_ring import ring_latent_attention
from ringlab.ring.layouts import LAYOUTS
from ringlab.states.short_convolution import ring_short_convolution
from ringlab.states.state_ring import ring_linear_attention
from tests.doctor.examined import examined, on_these
from tests.wrong import odd_patients, sick_rings

NAMES = ("out", "lse", "dq", "dk", "dv")
MASKS = [(False, "contiguous"), *((True, layout) for layout in LAYOUTS)]


# The judge ---------------------------------------------------------------------------------------------------------


def stored(question):
    """The right results as a ring that rounds only to store them returns them: {name: whole}."""
    return {name: right.exact.to(right.dtype, copy=True) for name, right in right_results(question).items()}


def judged(question, results, faults=()):
    """The answer of ranks that return their parts of these results."""
    case = question.case
    of_ranks = [{name: case.cut(x, rank) for name, x in results.items()} for rank in range(case.world_size)]
    return judge(question, [RankResults(parts, list(faults)) for parts in of_ranks])


QUESTION = Question(Case(3, 18, True, "zigzag", dtype=torch.float32))


def off_by(share, right):
    """`right` stored, but for one number, which is off by a little more, or less, than this share of the bound."""
    x = right.exact.to(right.dtype, copy=True)
    at = tuple(n // 2 for n in x.shape)
    wanted = right.exact[at] + share * right.allowed[at]
    number = wanted.to(right.dtype)
    further = torch.tensor(math.inf if share > 1 else -math.inf, dtype=right.dtype)
    while (number.double() < wanted) == (share > 1) and number.double() != wanted:
        number = number.nextafter(further)
    x[at] = number
    return x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [(torch.float64, "normal"), (torch.float32, "normal"), (torch.bfloat16, "large"), (torch.float16, "silent rank")],
)
def test_the_threshold_is_what_rounding_allows(name, dtype, inputs):
    question = Question(replace(QUESTION.case, dtype=dtype, inputs=inputs))
    right, results = right_results(question)[name], stored(question)
    within, beyond = (judged(question, results | {name: off_by(share, right)}) for share in (0.9, 1.1))
    assert (within.state, within.in_float32) == (OK, False)
    if dtype == torch.float64:  # as exact as float32 is excused there
        assert (beyond.state, beyond.in_float32) == (OK, True)
        in_float32 = right_results(Question(QUESTION.case))[name].allowed / right.allowed
        assert judged(question, results | {name: off_by(3 * in_float32.max(), right)}).state == WRONG
        return
    assert (beyond.state, set(beyond.wrong), beyond.in_float32) == (WRONG, {name}, False)
    assert beyond.wrong[name] > 1
    assert beyond.ranks == {name: (2,)}  # off_by changes token 9 of 18, and in zigzag rank 2 has the tokens 6 to 11


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("number", "dtype"), [(math.nan, torch.float64), (-math.inf, torch.bfloat16)])
def test_nan_and_infinity_are_wrong(name, number, dtype):
    question = Question(replace(QUESTION.case, dtype=dtype))
    results = stored(question)
    results[name][0, 1, 7] = number
    answer = judged(question, results)
    assert answer.state == WRONG
    assert set(answer.wrong) == {name}
    assert (answer.relative[name], answer.errors[name][0]) == (math.inf, math.inf)
    assert answer.ranks[name] == (2,)  # of six pieces of 3 tokens rank 2 has the tokens 6 to 8 and 9 to 11


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize(
    ("given", "returned"), list(itertools.permutations((torch.float64, torch.float32, torch.bfloat16), 2))
)
def test_another_dtype_than_the_input_is_a_fault(name, given, returned):
    question = Question(replace(QUESTION.case, dtype=given))
    results = stored(question)
    answer = judged(question, results | {name: results[name].to(returned)})
    assert answer.state == FAILED
    assert f"its {name} is {returned}, its input {given}" in answer.says


def test_lse_may_have_a_wider_dtype_and_no_narrower_one():
    results = stored(QUESTION)
    assert judged(QUESTION, results | {"lse": results["lse"].double()}).state == OK
    assert set(judged(QUESTION, results | {"lse": results["lse"].bfloat16()}).wrong) == {"lse"}


@pytest.mark.parametrize("name", NAMES)
def test_another_shape_is_a_fault(name):
    question = Question(Case(3, 19))  # 7 tokens on rank 0, 6 on the others
    results = stored(question)
    for wrong in range(3):
        of_ranks = [{n: question.case.cut(x, rank) for n, x in results.items()} for rank in range(3)]
        right, of_ranks[wrong][name] = of_ranks[wrong][name], (short := of_ranks[wrong][name][:, :, :-1])
        answer = judge(question, [RankResults(parts) for parts in of_ranks])
        assert answer.state == FAILED
        assert answer.says == f"its {name} has shape {(*short.shape,)} on rank {wrong}; expected {(*right.shape,)}"


def test_faults_and_lost_gradients():
    results = stored(QUESTION)
    answer = judged(QUESTION, results, faults=["it changed its input k"])
    assert (answer.state, answer.says, answer.returned) == (FAILED, "it changed its input k", True)
    parts = [{name: QUESTION.case.cut(x, rank) for name, x in results.items()} for rank in range(3)]
    for rank in range(3):  # of one rank: a fault too, and random numbers, and an lse without a gradient
        of_ranks = [RankResults(part, draws=r == rank, lse_grad=r != rank) for r, part in enumerate(parts)]
        of_ranks[rank].faults.append("it changed its input q")
        answer = judge(QUESTION, of_ranks)
        assert (answer.says, answer.draws, answer.lse_grad) == ("it changed its input q", True, False)
    for name in ("dq", "dk", "dv"):
        answer = judged(QUESTION, results | {name: torch.zeros_like(results[name])})
        assert (answer.state, set(answer.wrong)) == (WRONG, {name})
        assert answer.relative[name] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("P", "times", "state", "whole"),
    [
        (3, (1, 1, 1), OK, True),
        (3, (0.5, 0.25, 0.25), OK, False),  # parts: their sum is the whole
        (3, (1, 0, 0), OK, False),
        (3, (1, 1, 0), WRONG, False),
        (1, (1,), OK, False),
    ],
)
def test_a_rank_returns_its_part_of_what_is_learned_or_every_rank_the_whole(P, times, state, whole):
    question = Question(Case(P, 6 * P, sinks=True))
    results = stored(question)
    dsinks = results.pop("dsinks")
    parts = [{name: question.case.cut(x, rank) for name, x in results.items()} for rank in range(P)]
    answer = judge(question, [RankResults(part | {"dsinks": n * dsinks}) for part, n in zip(parts, times, strict=True)])
    assert (answer.state, answer.whole, {*answer.wrong}) == (state, whole, {"dsinks"} if state == WRONG else set())
    assert set(answer.ranks.values()) == ({(0, 1, 2)} if state == WRONG else set())


def of_torch(case, dtype=torch.float32, *, autocast=False):
    """Attention in torch's steps, for tensors of a dtype; each gradient in its tensor's dtype."""
    q, k, v, d_out = (x.to(dtype) for x in case.whole())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (k, v))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = (q @ k.mT * case.head_dim**-0.5).masked_fill(~case.visible(), -math.inf)
        if case.sinks:
            scores = torch.cat([scores, case.sink_scores().to(dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
        out = scores.softmax(dim=-1)[..., : case.seq_len] @ v
    found = torch.autograd.grad(out, leaves, d_out.to(out.dtype))
    return {name: x.detach() for name, x in zip(NAMES, (out, scores.logsumexp(dim=-1), *found), strict=True)}


@pytest.mark.parametrize("value_dim", [3, 7])
def test_with_sinks_v_may_be_narrower_or_wider_than_k(value_dim):
    question = Question(Case(3, 18, True, sinks=True, value_dim=value_dim))
    right = right_results(question)
    assert all(right[name].accepts(x) for name, x in of_torch(question.case, torch.float64).items())


def in_float32(case):
    """The results of a ring that computes in float32, and rounds its inputs too."""
    return {name: x.double() for name, x in of_torch(case).items()}


@given(st.integers(0, 10**6), st.sampled_from(MASKS), st.sampled_from([4, 64]))
def test_float32_inside_is_excused_in_float64(seed, mask, head_dim):
    question = Question(Case(3, 18, *mask, head_dim=head_dim, seed=seed))
    answer = judged(question, in_float32(question.case))
    assert (answer.state, answer.in_float32) == (OK, True)


@pytest.mark.parametrize(("times", "state"), [(1.9, OK), (2.1, WRONG)])
@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_number_beside_float32_is_not_excused(name, times, state):
    """Every number counts, not the largest error, nor the result that is the most wrong."""
    question = Question(replace(QUESTION.case, dtype=torch.float64))
    results = in_float32(question.case)
    right = right_results(question)[name]
    allowed = right_results(Question(replace(question.case, dtype=torch.float32)))[name].allowed
    smallest = int(allowed.argmin())
    results[name] = results[name].clone(memory_format=torch.contiguous_format)
    results[name].view(-1)[smallest] = right.exact.flatten()[smallest] + times * allowed.flatten()[smallest]
    answer = judged(question, results)
    assert (answer.state, answer.in_float32, name in answer.wrong) == (state, state == OK, state == WRONG)


@pytest.mark.parametrize("change", [{"dtype": torch.float32}, {"inputs": "large"}])
def test_only_normal_numbers_in_float64_are_excused(change):
    question = Question(replace(QUESTION.case, **({"dtype": torch.float64} | change)))
    results = stored(question)
    results["out"] = results["out"] * (1 + 1e-4)
    assert judged(question, results).state == WRONG


# Under autocast ----------------------------------------------------------------------------------------------------

AUTOCAST = Question(Case(3, 18, True, dtype=torch.bfloat16), "autocast")


@given(st.integers(0, 10**6), st.sampled_from(MASKS), st.sampled_from([4, 64]), st.booleans())
def test_steps_of_torch_under_autocast_are_right(seed, mask, head_dim, autocast):
    question = Question(Case(3, 18, *mask, head_dim=head_dim, dtype=torch.bfloat16, seed=seed), "autocast")
    answer = judged(question, of_torch(question.case, autocast=autocast))
    assert answer.state == OK, answer.wrong


def test_mistakes_under_autocast_are_seen():
    """A mask forgotten, a gradient lost, two blocks added up."""
    results = of_torch(AUTOCAST.case, autocast=True)
    unmasked = of_torch(replace(AUTOCAST.case, causal=False), autocast=True)
    for name, x in results.items():
        assert set(judged(AUTOCAST, results | {name: unmasked[name]}).wrong) == {name}
        assert set(judged(AUTOCAST, results | {name: 2 * x}).wrong) == {name}
        assert set(judged(AUTOCAST, results | {name: 0 * x}).wrong) == {name}
    assert judged(AUTOCAST, results | {"out": results["out"].double()}).state == FAILED


@pytest.mark.parametrize(
    ("in_16_bits", "times", "state"), [("", 1.9, OK), ("", 2.1, WRONG), ("too", 1.9, WRONG), ("", None, WRONG)]
)
def test_sums_in_16_bits_under_autocast_alone_are_right_if_plain_attention_is_no_more_exact(in_16_bits, times, state):
    """Wrong without autocast too, or so many times the error of plain attention; None: only such sums are asked."""
    sums, usual = Case(4, 32, dtype=torch.bfloat16, inputs=UNROUNDED[0]), AUTOCAST.case
    steps = CATALOGUE["sums_in_16_bits"].variants[0](RIGHT)
    rounded, right = ({"out": compute(sums, of)["out"].bfloat16()} for of in (steps, RIGHT))
    answers = [judged(Question(sums, "without gradients"), rounded if in_16_bits else right)]
    answers.append(judged(Question(sums, "autocast"), rounded))
    if times:
        exact = {name: right.exact for name, right in usual.right().items()}
        found = of_torch(usual, autocast=True)
        found |= {"dk": exact["dk"] + times * (found["dk"] - exact["dk"])}  # one result is enough
        answers.append(judged(AUTOCAST, {name: x.float() for name, x in found.items()}))
    said = compared_under_autocast(answers)
    assert (answers[1].state, said) == (state, [PRODUCTS] if state == OK else [])


# What is asked -----------------------------------------------------------------------------------------------------

RING = patient_of(ring_flash_attention, worlds=(1, 2, 3, 4, 5), dtypes=("float64", "float32", "bfloat16", "float16"))
ASKED = Path(__file__).with_name("asked.txt")  # python -m tests.doctor.test_questions writes it


def all_questions(patient, seed=0):
    return [question for P in patient.worlds for question in questions(patient, P, seed)]


def in_words(question):
    """A question, what is called before, and the feature that a ring may refuse."""
    before = "".join(f"; after {case.words()}" for case in question.others)
    return f"{question.words()}{before}" + (f"; may refuse: {question.feature}" if question.feature else "") + "\n"


def plain_only(q, k, v):
    return ring_flash_attention(q, k, v)


def with_a_pair(q, k, v, causal=False, window_size=(-1, -1)):
    return ring_flash_attention(q, k, v, causal=causal)


def in_zigzag(q, k, v, *, g, initial_state=None, layout="contiguous"):
    return q


PATIENTS = {
    "every argument": RING,
    "no option": patient_of(plain_only),
    "no groups, equal chunks, one head dim": replace(RING, grouped=False, unequal=False, own_values=False),
    "forward only": replace(RING, gradients=False),
    "zigzag in float64 only": patient_of(odd_patients.right, causal=True, layouts="zigzag", dtypes="float64"),
    **{f"{', '.join(only)} only": replace(RING, dtypes=only) for only in (("float64", "float32"), ("float16",))},
    **{f"{worlds} ranks": replace(RING, worlds=worlds) for worlds in ((1, 2, 3), (2, 3), (6, 8))},
    "own sizes": replace(RING, heads=6, kv_heads=3, head_dim=24, chunk=16, batch=2),
    "a pair for the window": patient_of(with_a_pair, worlds=(1, 4, 5)),
    "the least sizes": replace(RING, chunk=4, head_dim=1),
    "states": patient_of(ring_linear_attention, state=True, worlds=(2, 3)),
    "states of each key": patient_of(in_zigzag, state="each key", worlds=(2, 3)),
    "a convolution": patient_of(ring_short_convolution, state=True, worlds=(2, 3)),
    "latents": patient_of(ring_latent_attention, worlds=(2, 3)),
}
IN_WORDS = ("every argument", "states", "states of each key", "a convolution", "latents")


def asked_of(name):
    """All questions to a ring with every argument; of other patients what is asked, in which sizes, how often."""
    found = all_questions(PATIENTS[name])
    if name in IN_WORDS:
        not_asked = ", ".join(Examination(PATIENTS[name]).not_asked)
        return "".join([f"{name}; not asked: {not_asked}\n", *map(in_words, found), "\n"])
    worlds, what = (Counter(map(of, found)) for of in (lambda it: it.case.world_size, Question.what))
    shapes = {(it.batch, it.heads, it.kv_heads, it.head_dim, it.value_dim) for it in (each.case for each in found)}
    asked = "; ".join(f"{n} x {words}" for words, n in sorted(what.items()))
    lines = [f"{name}: {sorted(worlds.items())}", f"B, H, G, D, D of V: {sorted(shapes, key=str)}", asked]
    return "\n    ".join(lines) + "\n\n"


@pytest.mark.parametrize("name", PATIENTS)
def test_everything_that_is_asked(name):
    """A question that is lost, or asked with fewer ranks, masks or dtypes, or that must be answered, is missed here."""
    assert asked_of(name) in ASKED.read_text()


@pytest.mark.parametrize(("right", "last"), [(2, lambda i: i + 2), (-1, lambda i: 8)])
def test_without_a_causal_mask_a_window_has_two_sides(right, last):
    seen = Case(2, 8, window=3, window_right=right, documents=(7, 1)).visible().tolist()
    assert seen == [[i - 3 < j <= last(i) and (i < 7) == (j < 7) for j in range(8)] for i in range(8)]


@pytest.mark.parametrize("layouts", [LAYOUTS[:1], LAYOUTS[:2], LAYOUTS])
def test_each_mask_meets_each_way_to_ask_on_an_odd_and_on_an_even_number_of_ranks(layouts):
    asked = [it for it in all_questions(replace(RING, layouts=layouts)) if it.case.world_size in (3, 4)]
    met = {(it.how, it.case.causal, it.case.world_size) for it in asked}
    alone = [how for how in WAYS if not how.startswith("beside")]
    assert met >= set(itertools.product(alone, (False, True), (3, 4)))


def test_the_last_mask_and_layout_is_asked_in_each_way_where_there_are_no_three_ranks():
    asked = all_questions(replace(RING, worlds=(2, 4)))
    assert LAYOUTS[-1] in {it.case.layout for it in asked if it.how == "views"}


@pytest.mark.parametrize("head_dim", [1, 4, 5, 16, 17, 63, 64, 65, 256])
def test_the_scale_of_inputs_that_round_nothing_is_a_power_of_two(head_dim):
    patient = replace(RING, head_dim=head_dim, causal=(True,), layouts=("striped",))
    [found] = {q.case.head_dim for q in questions(patient, 4, 0) if q.case.inputs in UNROUNDED}
    assert found >= head_dim
    assert found in (4, 16, 64, 256)
    assert found == 4 or found < 4 * head_dim


def test_with_all_options_the_first_half_of_unequal_chunks_is_longer():
    """A gather that pads to the longest chunk is right where all but the last have one length."""
    of_all = [it.case for it in questions(RING, 4, 0) if it.together and not it.case.equal_chunks]
    assert {tuple(len(case.positions(rank)) for rank in range(4)) for case in of_all} == {(8, 8, 7, 7)}


# What a quick examination asks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["every argument", "(1, 2, 3) ranks"])
def test_every_kind_of_question_is_asked_and_each_mask_and_layout_on_each_number_of_ranks(name):
    """Of each kind the last question, which is causal, comes first; the others follow where it is refused."""
    patient = PATIENTS[name]
    groups = [group for P in patient.worlds for group in in_turn(patient, P, 0, quick=True).values()]
    every = all_questions(patient)
    assert sorted(map(repr, every)) == sorted(repr(question) for group in groups for question in group)
    assert all(len({question.together or kind(question) for question in group}) == 1 for group in groups)
    plain = [[it for it in every if kind(it) == kind(every[0])], [it for it in groups if kind(it[0]) == kind(every[0])]]
    assert plain[1] == [[question] for question in plain[0]]
    for group in groups:
        first_of_world = [question for question in every if question.case.world_size == group[0].case.world_size]
        assert group[::-1] == [it for it in first_of_world if it in group]
    in_full = in_turn(patient, 3, 0, quick=False).values()
    assert [question for group in in_full for question in group[::-1]] == [*questions(patient, 3, 0)]
    assert all(len({(it.together and (it.together, it.case.mask())) or it for it in group}) == 1 for group in in_full)


# The inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [4, 64])
def test_large_scores_overflow(dtype, head_dim):
    case = Case(3, 18, inputs="large", dtype=dtype, head_dim=head_dim)
    q, k, *_ = (x.double() for x in case.whole())
    scores = q @ k.mT * head_dim**-0.5
    assert (scores[:, :, ::2].exp() == math.inf).all()
    assert (scores[:, :, 1::2].exp() == 0).all()
    assert all(right.exact.isfinite().all() for right in case.right().values())
    weights = scores.softmax(dim=-1)
    assert weights.amax(dim=-1).max() < 0.99  # and yet no key has all the weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 4), (6, 3, 8)])
def test_attention_sinks_are_one_more_logit_in_each_softmax(dtype, heads, kv_heads, head_dim):
    case = Case(3, 18, True, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, sinks=True)
    for name, x in of_torch(case, torch.float64).items():
        torch.testing.assert_close(case.right()[name].exact, x, rtol=1e-12, atol=1e-12)
    assert dtype != torch.float64 or case.right()["dsinks"].sums.max() < 1200 * torch.finfo(dtype).eps


ROUNDING = {  # entries that round, on paper: which inputs show them, and in which results
    "sums_in_16_bits": ("16-bit sums", {"out"}),
    "gradients_in_16_bits": ("16-bit gradients", {"dk", "dv"}),
    "dq_in_16_bits": ("16-bit gradients", {"dq"}),
}


@pytest.mark.parametrize("how", ["plain", "autocast"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ROUNDING)
def test_on_paper_sums_in_16_bits_show(how, mask, name):
    inputs, shows = ROUNDING[name]
    question = Question(Case(4, 32, *mask, inputs=inputs, dtype=torch.bfloat16), how)
    for variant in CATALOGUE[name].variants:
        results, right = compute(question.case, variant(RIGHT)), right_results(question)
        stored = {name: results[name].to(right[name].dtype) for name in right}
        assert judged(question, stored).wrong.keys() >= shows, variant


def partitions(blocks):
    """All ways to put the blocks into pieces."""
    if not blocks:
        return [[]]
    first, *others = blocks
    return [
        [*some[:n], [first, *piece], *some[n + 1 :]]
        for some in partitions(others)
        for n, piece in enumerate([*some, []])
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS)
def test_right_rings_may_round_each_piece_whichever_blocks_or_ranks_it_has(mask, dtype):
    for inputs, names in zip(UNROUNDED, (["out"], ["dq", "dk", "dv"]), strict=True):
        case = Case(4, 32, *mask, inputs=inputs, dtype=dtype)
        q, k, v, d_out = (x.double() for x in case.whole())
        p = (0.5 * q @ k.mT).masked_fill(~case.visible(), -math.inf).softmax(dim=-1)
        d_s = 0.5 * p * (d_out @ v.mT - (d_out * (p @ v)).sum(dim=-1, keepdim=True))
        for partition in partitions(range(4)):
            sums = dict.fromkeys(names, 0)
            for piece in partition:
                at = torch.cat([case.positions(rank) for rank in piece])
                share = p[..., at].sum(dim=-1, keepdim=True)
                out = p[..., at] @ v[:, :, at] / share.where(share > 0, 1.0)
                dk, dv = d_s[:, :, at].mT @ q[:, :, at], p[:, :, at].mT @ d_out[:, :, at]
                parts = {"out": out, "dq": d_s[..., at] @ k[:, :, at], "dk": dk, "dv": dv}
                for name in names:
                    sums[name] = sums[name] + parts[name].to(dtype).double() * (share if name == "out" else 1)
            assert all(case.right()[name].accepts(sums[name].to(dtype)) for name in names), partition


# Real rings --------------------------------------------------------------------------------------------------------


def answers_of(ranks, function, worlds=(3,), wanted=lambda question: True, **claims):
    """The answers of a real ring to the questions for the last of these numbers of ranks."""
    P = worlds[-1]
    patient = patient_of(function, worlds=(*worlds, P + 1), **claims)
    with on_these(ranks):
        job = examination.Job(patient, P, 20.0, "cpu")
        larger = examination.Job(patient, P + 1, 20.0, "cpu")
        asked_now = [q for q in questions(patient, P, 0) if wanted(q) and q.feature != LSE]
        answers = [(larger if q.members else job).ask(q) for q in asked_now]
        job.close()
    return answers


def told(answers):
    bad = [answer for answer in answers if answer.state != OK]
    return [f"{answer.question.words()}: {answer.state} {answer.says} {answer.wrong}" for answer in bad]


@pytest.mark.slow
@pytest.mark.parametrize("ring", sick_rings.ESCAPED)
def test_a_ring_that_errs_in_one_kind_of_question_is_caught_by_it(ranks, ring):
    """Or what it does not take is no fault: there it raises."""
    expected, refuses = sick_rings.ESCAPED[ring], ring in sick_rings.REFUSED
    plain = {"C = 6", "views, batch of 2, C = 6", *expected}
    answers = answers_of(ranks, ring, wanted=lambda question: question.what() in plain, unequal=False)
    bad = [answer for answer in answers if answer.state != OK and (refuses or answer.state != REFUSED)]
    assert {answer.question.what() for answer in bad} == expected, told(bad)
    assert not refuses or all(answer.raised for answer in bad)


@pytest.mark.slow
def test_what_a_longer_call_leaves_behind_spoils_no_later_answer(ranks):
    """After this first fault each length gets processes of its own."""
    asked = {"after another length, C = 12", "large scores, C = 6"}
    ranks.stop()  # processes that have seen no other length
    ring = partial(sick_rings.padded_to_the_longest, least=0)
    found = examined(ranks, ring, wanted=lambda it: it.what() in asked, worlds=3, unequal=False)
    assert {answer.question.what() for answer in found.answers} == {"C = 6", *asked}
    assert {answer.question.how for answer in found.wrong} == {"after another length"}


@pytest.mark.slow
@pytest.mark.parametrize("ring", sick_rings.IN_16_BITS)
def test_a_ring_that_adds_up_in_16_bits_is_wrong_under_every_mask(ranks, ring):
    """And a right one under none."""
    inputs, shows = sick_rings.IN_16_BITS[ring]
    dtypes, unrounded = ("float64", "bfloat16", "float16"), lambda question: question.case.inputs in UNROUNDED
    answers = answers_of(ranks, ring, (4,), unrounded, dtypes=dtypes)
    assert len(answers) == 2 * 2 * len(MASKS)
    for answer in answers:
        expected = shows if answer.case.inputs == inputs else set()
        assert (set(answer.wrong), answer.state) == (expected, WRONG if expected else OK), answer.question.words()


if __name__ == "__main__":
    ASKED.write_text("".join(map(asked_of, PATIENTS)))

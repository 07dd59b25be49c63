"""Rings of states: the right ones are healthy, and each real wrong one has its name. Worlds of 1, 2, 3 and 5 ranks."""

from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist

from ring_doctor.asking.examination import examination_of
from ring_doctor.asking.latent_case import LatentCase, LatentSteps, compute_latents
from ring_doctor.asking.patient import OPTION, patient_of
from ring_doctor.asking.state_case import RIGHT_STATES, Convolution, StateCase, channels, compute_states
from ring_doctor.assertion import examine
from ring_doctor.explaining import xray
from ring_doctor.explaining.diagnosis import diagnose
from ring_doctor.mistakes import latents
from ring_doctor.mistakes.states import MISTAKES
from ring_doctor.report import Report, as_json, page
from ringlab.ring.latent_ring import ring_latent_attention
from ringlab.states.linear_attention import Map, checked_inputs, each_of, in_chunks, recurrence, states_along
from ringlab.states.short_convolution import ring_short_convolution
from ringlab.states.state_ring import ring_linear_attention
from tests.doctor.examined import on_these
from tests.wrong.odd_patients import gathered

WORLDS = (1, 2, 3, 5)
FEW = {"unequal": False, "dtypes": "float64", "quick": True}  # of a wrong ring: right ones are asked everything


def right(way, q, k, v, log_decay, beta, documents=None, state=None):
    return ring_linear_attention(q, k, v, log_decay, beta, documents=documents, way=way, state=state)


def in_zigzag(q, k, v, *, g, layout="contiguous"):
    return ring_linear_attention(q, k, v, g, layout=layout)[0]


def by_factors(q, k, v, decay):
    """(B, C, H, D), and a decay of 0 to 1 in place of its logarithm."""
    q, k, v, decay = (x.transpose(1, 2) for x in (q, k, v, decay))
    return ring_linear_attention(q, k, v, decay.log())[0].transpose(1, 2)


# A ring that gathers the maps of all ranks. A mistake changes one of its steps ---------------------------------------


def maps_of(q, k, v, log_decay, beta):
    """The map of each rank's tokens, over messages with gradients; and this rank's chunks."""
    x, empty = checked_inputs(q, k, v, log_decay, beta)
    chunks = in_chunks(x, q.shape[-1] ** -0.5)
    mine = reduce(lambda first, then: then.after(first), each_of(chunks[1]))
    return [Map(*each) for each in zip(gathered(mine.keep), gathered(mine.add), strict=True)], chunks, empty


def from_state(chunks, h, tokens):
    reads, changes = chunks
    return reads(torch.stack(states_along(each_of(changes), h)[:-1], dim=2)).flatten(2, 3)[:, :, :tokens]


def starts_of(documents, q):
    at = torch.arange(q.shape[2]) + dist.get_rank() * q.shape[2]
    return torch.isin(at, torch.tensor(documents or (-1,)).cumsum(0))


def wrong(how, q, k, v, log_decay, beta=None, documents=None):
    rank, n, starts = dist.get_rank(), q.shape[2], starts_of(documents, q)
    if how == "documents_ignored":
        starts = starts & False
    starts = starts if log_decay.dim() == 3 else starts[:, None]
    maps, chunks, h = maps_of(q, k, v, log_decay.masked_fill(starts, -torch.inf), beta)
    before = {"reversed": maps[:rank:-1], "nothing": []}.get(how, maps[:rank])
    h = states_along(before, h)[-1] + 0 * sum(
        one.keep.sum() + one.add.sum() for one in maps
    )  # all ranks go back together
    if how == "summed":
        h = sum((one.add for one in maps[:rank]), 0 * h)
    if how == "detached":
        h = h.detach()
    out = from_state(chunks, h, n)
    if how in ("undecayed", "late"):
        local = from_state(chunks, 0 * h, n)
        faded = (
            0 * log_decay if how == "undecayed" else torch.cat([0 * log_decay[:, :, :1], log_decay[:, :, :-1]], dim=2)
        )
        faded = faded.masked_fill(starts, -torch.inf)
        handed = in_chunks(checked_inputs(q, k, 0 * v, faded, beta)[0], q.shape[-1] ** -0.5)
        out = local + from_state(handed, h, n)
    return out


def documents_forgotten(how, x, weight, documents=None):
    return ring_short_convolution(x, weight)


def convolution(how, x, weight):
    rank, n = dist.get_rank(), weight.shape[1] - 1
    everyone = gathered(x)
    nothing = 0 * sum(chunk.sum() for chunk in everyone)  # all ranks go back together
    before = torch.cat([nothing.expand(*x.shape[:2], n), *everyone[:rank]], dim=2)
    before = {"zeros": 0 * before, "detached": before.detach()}.get(how, before)
    row = torch.cat([before[..., -n:], x], dim=2)
    return torch.nn.functional.conv1d(row, weight[:, None], groups=len(weight))


SICK = {  # a ring, and the mistake that it has
    "nothing": (wrong, "state_not_handed_on"),
    "reversed": (wrong, "state_of_the_wrong_neighbour"),
    "summed": (wrong, "states_summed_without_decay"),
    "undecayed": (wrong, "decay_of_the_chunk_forgotten"),
    "late": (wrong, "decay_after_the_write"),
    "detached": (wrong, "gradient_of_the_state_dropped"),
    "documents_ignored": (wrong, "state_not_reset_at_documents"),
    "zeros": (convolution, "border_tokens_missing"),
    "detached taps": (convolution, "gradient_of_the_border_dropped"),
    "documents of taps": (documents_forgotten, "state_not_reset_at_documents"),
}


def examined(ranks, function, worlds=WORLDS, state=True, quick=False, **claims):
    with on_these(ranks):
        found = examination_of(patient_of(function, state=state, worlds=worlds, **claims), quick=quick)
    return Report(found, None if found.healthy else diagnose(found), "none")


@pytest.mark.parametrize(
    ("function", "claims"),
    [
        *((partial(right, way), {}) for way in ("hops", "scan", "gather")),
        (in_zigzag, {"unequal": False}),
        (by_factors, {"tensors": "bshd", "state": "each key"}),
        (ring_short_convolution, {}),
        (partial(wrong, "right"), {"unequal": False}),
    ],
)
def test_a_right_ring_of_states_is_healthy(ranks, function, claims):
    report = examined(ranks, function, **claims)
    assert report.level == "right", str(report)
    assert {answer.case.world_size for answer in report.examination.answers} == set(WORLDS)


@pytest.mark.parametrize("how", SICK)
def test_a_wrong_ring_of_states_is_named(ranks, how):
    function, name = SICK[how]
    report = examined(ranks, partial(function, how.partition(" ")[0]), (3,), **FEW)
    assert report.verdict.startswith(f"SICK: {name}, in "), str(report)
    if name == "gradient_of_the_state_dropped":  # out is right, and of the last rank everything
        assert {name for it in report.examination.wrong for name in it.wrong} == {"dk", "dv", "dlog_decay", "dbeta"}
        assert all(
            it.case.world_size - 1 not in ranks for it in report.examination.wrong for ranks in it.ranks.values()
        )


def state_detached(q, k, v, log_decay, initial_state=None):
    return ring_linear_attention(q, k, v, log_decay, state=None if initial_state is None else initial_state.detach())


def state_of_every_rank(q, k, v, log_decay, h0=None):
    """Each rank adds the state that was there before the first token."""
    out = ring_linear_attention(q, k, v, log_decay, state=h0)[0]
    reads = out if h0 is None else ring_linear_attention(q, 0 * k, v, log_decay, state=h0)[0]
    return out if h0 is None else out + (dist.get_rank() > 0) * reads


def taps_detached(x, weight):
    return ring_short_convolution(x, weight.detach())


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (state_detached, {"dstate"}),
        (state_of_every_rank, {"out", "dq", "dlog_decay", "dstate"}),
        (taps_detached, {"dweight"}),
    ],
)
def test_what_is_learned_is_compared(ranks, function, wrong):
    report = examined(ranks, function, (3,), **FEW)
    assert {name for it in report.examination.wrong for name in it.wrong} == wrong
    assert all("from a state" in it.question.words() for it in report.examination.wrong) == (wrong != {"dweight"})


# On paper -------------------------------------------------------------------------------------------------------------


def cases():
    for given, more in (
        (("log_decay", "beta"), {}),
        (("log_decay",), {"each_key": True}),
        ((), {}),
        ((), {"taps": 4}),
        (("log_decay", "beta"), {"from_state": True}),
    ):
        for P, S, documents in ((1, 6, None), (3, 16, None), (5, 5, None), (3, 18, (2, 1, 3, 12)), (2, 12, (7, 5))):
            yield StateCase(P, S, True, documents=documents, batch=2, given=given, **more)


def by_recurrence(case):
    """out, document by document."""
    *inputs, _ = case.whole()
    outs, state = [], case.learned.get("state")
    for q, k, v, *more in zip(*(x.split(list(case.documents or (case.seq_len,)), dim=2) for x in inputs), strict=True):
        if case.taps:
            x = torch.nn.functional.pad(channels(q), (case.taps - 1, 0))
            row = torch.nn.functional.conv1d(x, case.learned["weight"][:, None], groups=x.shape[1])
            outs.append(row.unflatten(1, q.shape[1::2]).mT)
        else:
            outs.append(recurrence(q, k, v, **dict(zip(case.given, more, strict=True)), state=state)[0])
        state = None  # the first document begins with it
    return torch.cat(outs, dim=2)


def test_on_paper_a_ring_without_a_mistake_is_right():
    for case in cases():
        assert case.right()["out"].accepts(by_recurrence(case)), case.words()
        for name, x in compute_states(case).items():
            assert case.right()[name].accepts(x), f"{name} of {case.words()}"


def test_what_a_function_of_states_is_given():
    patient = patient_of(in_zigzag, state=True)
    assert (patient.takes, patient.layouts) == ({"log_decay", "layout"}, ("contiguous", "zigzag"))
    assert isinstance(patient_of(ring_short_convolution, state=True).function, Convolution)
    for function in (in_zigzag, ring_latent_attention):  # what is claimed goes before what is usual
        asked = patient_of(function, state=function is in_zigzag, grouped=True, dtypes="bfloat16")
        assert (asked.grouped, asked.dtypes, bool(asked.state)) == (True, ("bfloat16",), True)
    assert {"g", "decay", "log_decay", "beta"} <= set(OPTION)


SHOWS = {
    "state_not_handed_on": "missing",
    "decay_of_the_chunk_forgotten": "scaled",
    "state_not_reset_at_documents": "leak 16",
}


@pytest.mark.parametrize("name", SHOWS)
def test_what_a_row_reads_of_earlier_tokens(name):
    _, run = xray.cases(StateCase(3, 12, causal=True, documents=(5, 7) if "documents" in name else None))
    assert xray.of_states(compute_states(run)["out"], run).right
    out = compute_states(run, MISTAKES[name].variants[0](RIGHT_STATES))["out"]
    assert SHOWS[name] in xray.of_states(out, run).text()


def test_what_has_no_name_is_told_by_what_the_numbers_are_multiplied_by(ranks):
    for how, says in (
        ("twice", "In out, dq, dk, dv, dlog_decay and dbeta all numbers are 1/scale or 2 times the right numbers"),
        ("dbeta", "In dbeta all numbers are 0 times the right numbers"),
    ):
        with on_these(ranks):
            report = examine(partial(unnamed, how), state=True, worlds=3, quick=True, unequal=False, dtypes="float64")
        assert f": {says}" in report.verdict
        said = as_json(report)
        assert (said["level"], said["mistakes"]) == ("wrong", [])
        assert "P = 3, state and log_decay and beta" in page(said, str(report))


def unnamed(how, q, k, v, log_decay, beta):
    beta = beta.detach() if how == "dbeta" else beta
    return ring_linear_attention(q, k, v, log_decay, beta)[0] * (2 if how == "twice" else 1)


# Latents and chosen keys ----------------------------------------------------------------------------------------------


def latents_by_gather(how, q, latents, rope_keys, w_k, w_v, *, causal=False, chosen=None):
    """All latents and rotated keys, gathered with their gradients. `how` names a mistake, or none."""
    rank, P, C = dist.get_rank(), dist.get_world_size(), q.shape[2]
    blocks, ropes = gathered(latents), gathered(rope_keys)
    if how == "gradient dropped":
        blocks, ropes = ([x if (rank - j) % P < 2 else x.detach() for j, x in enumerate(xs)] for xs in (blocks, ropes))
    if how == "own rope":
        ropes = [rope_keys + 0 * x for x in ropes]
    c, rope = torch.cat(blocks, dim=1)[:, None], torch.cat(ropes, dim=1)[:, None]
    if how == "dw":  # each rank scales its part: then the step adds the parts, too
        w_k, w_v = (w / 2 + (w * (P - 0.5) - (w * (P - 0.5)).detach() + (w / 2).detach()) for w in (w_k, w_v))
    k = torch.cat([c @ w_k.mT, rope.expand(-1, len(w_k), -1, -1)], dim=-1)
    keys, queries = torch.arange(P * C), torch.arange(C) + rank * C
    seen = keys <= queries[:, None] if causal else torch.ones(C, P * C, dtype=torch.bool)
    if chosen is not None:
        seen = seen & (chosen[..., None] == (keys % C if how == "local" else keys)).any(dim=2)[:, None]
    times = (1 - rope.shape[-1] / q.shape[-1]) ** -0.5 if how == "scale of D" else 1
    scores = (q @ k.mT * q.shape[-1] ** -0.5 * times).masked_fill(~seen, -1e4)
    return (scores.softmax(dim=-1) * seen) @ (c @ w_v.mT)


LATENTS = {  # a ring, and the mistake that it has
    "own rope": (latents_by_gather, "rope_of_the_own_block"),
    "scale of D": (latents_by_gather, "scale_without_the_rope"),
    "gradient dropped": (latents_by_gather, "gradient_of_latents_dropped"),
    "dw": (latents_by_gather, "dw_counted_once_a_rank"),
    "local": (latents_by_gather, "chosen_positions_local"),
}


@pytest.mark.parametrize(
    ("function", "claims"),
    [
        (ring_latent_attention, {"layouts": ("contiguous", "zigzag", "striped")}),
        (partial(latents_by_gather, "right"), {"unequal": False}),
    ],
)
def test_a_right_ring_of_latents_is_healthy(ranks, function, claims):
    report = examined(ranks, function, (1, 3), state=False, **claims)
    assert report.level == "right", str(report)


@pytest.mark.parametrize("how", LATENTS)
def test_a_wrong_ring_of_latents_is_named(ranks, how):
    function, name = LATENTS[how]
    report = examined(ranks, partial(function, how), (3,), state=False, causal=True, **FEW)
    assert report.verdict.startswith(f"SICK: {name}, in "), str(report)


OF_LATENTS = [
    LatentCase(4, 16, True, layout, **kind) for kind in ({}, {"choose": True}) for layout in ("contiguous", "zigzag")
]


@pytest.mark.parametrize(
    ("mistakes", "compute", "right", "cases"),
    [
        (MISTAKES, compute_states, RIGHT_STATES, list(cases())),
        (latents.MISTAKES, compute_latents, LatentSteps(), OF_LATENTS),
    ],
)
def test_every_mistake_shows_somewhere_and_no_two_are_alike(mistakes, compute, right, cases):
    numbers = {}
    for mistake in mistakes.values():
        for variant in mistake.variants:
            found = [(case, compute(case, variant(right))) for case in cases]
            bad = [not case.right()[n].accepts(x) for case, results in found for n, x in results.items()]
            assert any(bad), mistake.name
            numbers.setdefault(tuple(float(x.sum()) for _, results in found for x in results.values()), mistake.name)
    assert len(numbers) == sum(len(mistake.variants) for mistake in mistakes.values())

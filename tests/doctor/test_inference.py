"""A pattern that is planted into right numbers is told. Random numbers show no pattern, and right rings no sentence."""

import linecache
import os
import tempfile
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from ring_doctor.asking.answers import FAILED, WRONG, Answer, Examination, right_results
from ring_doctor.asking.case import Case
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import UNEQUAL, Question
from ring_doctor.assertion import choose_question
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.facts import CONTENTS, WrongAnswer
from ring_doctor.explaining.inference import infer
from ring_doctor.explaining.inference import waiting as inferred
from ring_doctor.explaining.xray import cases as cases_of_xray
from ring_doctor.explaining.xray import on_paper, xray_of
from ring_doctor.mistakes.masks import sees
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from ringlab.ring.layouts import LAYOUTS
from tests.doctor.examined import answer_on_paper
from tests.wrong.odd_patients import right

PATIENT = patient_of(right)
NO_XRAY = "none was taken"
GRADIENTS = ("dq", "dk", "dv")
EVERYTHING = ("out", "lse", *GRADIENTS)


def cases(worlds=(2, 3, 4), masks=((False, "contiguous"), (True, "zigzag")), chunk=6, **features):
    return [Case(P, chunk * P, *mask, **features) for P in worlds for mask in masks]


def planted(change, of=None):
    """Answers with the right numbers, changed by change(case, results) -> {name: changed result}."""
    return [answer_on_paper(Question(case), change=lambda case, x: x | change(case, x)) for case in of or cases()]


def times(c, *names):
    """c(P) times the right numbers."""
    return lambda case, x: {name: c(case.world_size) * x[name] for name in names}


def only(name, change):
    return lambda case, x: {name: change(x[name])}


def chunkwise(move, *names):
    of = lambda case, x: case.join([move(case.cut(x, r)) for r in range(case.world_size)])  # noqa: E731
    return lambda case, x: {name: of(case, x[name]) for name in names}


def from_rank(rank, *names):
    """The chunk of rank(r, P) of P ranks on rank r."""
    at = lambda case: [rank(r, case.world_size) % case.world_size for r in range(case.world_size)]  # noqa: E731
    return lambda case, x: {name: case.join([case.cut(x[name], r) for r in at(case)]) for name in names}


def noise(*names, where=lambda case, x: torch.ones_like(x, dtype=torch.bool)):
    """Random numbers added to these results, in the places that `where` names."""

    def change(case, x):
        generator = torch.Generator().manual_seed(case.world_size + case.seq_len)
        random = {name: torch.randn(x[name].shape, generator=generator, dtype=torch.float64) for name in names}
        return {name: torch.where(where(case, x[name]), x[name] + random[name], x[name]) for name in names}

    return change


def small(c):
    """Relative errors of up to c / 2, each another."""
    generator = torch.Generator().manual_seed(0)
    return only("out", lambda x: x * (1 + c * (torch.rand(x.shape, generator=generator).double() - 0.5)))


def one_nan(case, x):
    return {"out": x["out"].index_fill(2, torch.tensor(3), torch.nan)}


def heads(*numbers):
    """Where the query head is one of these."""
    return lambda case, x: torch.isin(torch.arange(x.shape[1]), torch.tensor(numbers))[:, None, None].expand_as(x)


def sequences(*wrong):
    of = torch.isin(torch.arange(3), torch.tensor(wrong)).view(3, 1, 1, 1)
    return lambda: planted(noise("out", where=lambda case, x: of), cases(batch=3))


def but_with(P, change):
    """Random numbers on P ranks in place of the change."""
    return lambda: planted(lambda case, x: (noise("dq") if case.world_size == P else change)(case, x))


def more_than_rounding(case, x):
    return {"dq": x["dq"] + 4 * replace(case, dtype=torch.float32).right()["dq"].allowed}


def shuffled_in_float32(case, x):
    return {"dv": x["dv"][:, :, SHUFFLED] + replace(case, dtype=torch.float32).right()["dv"].allowed.max()}


def little_noise(case, x):
    return {"out": x["out"] + 4e-6 * noise("out")(case, {"out": 0 * x["out"]})["out"]}


def usual_scale(case, x):
    return {name: x[name] * case.head_dim**-0.5 / case.scale for name in ("dq", "dk")}


def zero_on_3_ranks(case, x):
    return {"dq": 2 * x["dq"]} | ({"dv": 0 * x["dv"]} if case.world_size == 3 else {})


def home(kept):
    return replace(RIGHT, home=lambda part: part.block if kept(part) else None)


def seen(case, name):
    """Random numbers, and the X-ray on paper of a ring with this mistake, or with these steps."""
    steps = CATALOGUE[name].variants[0](RIGHT) if isinstance(name, str) else name
    return lambda: (planted(noise(*EVERYTHING)), on_paper(case, steps))


def changed_xray(change):
    runs = cases_of_xray(P3)
    return lambda: (planted(noise(*EVERYTHING)), xray_of(*(compute(run) | change(run) for run in runs), P3))


def key_0_thrice(case):
    """dk and dv of key 0 are 3 times too large."""
    results, factor = compute(case), 1 + 2 * (torch.arange(12) == 0)[:, None]
    return {name: results[name] * factor for name in ("dk", "dv")}


def value_0_thrice(case):
    q, k, v, d_out = case.whole()
    return {"out": compute(case, whole=(q, k, torch.cat([3 * v[:, :, :1], v[:, :, 1:]], dim=2), d_out))["out"]}


def known(case):
    """dq and dk whose tiles say less than is known."""
    return noise("dq")(case, x := compute(case)) | {"dk": 0 * x["dk"]}


def imprecise(inputs, wrong, tokens=32):
    """An answer in bfloat16 whose result `wrong` is off by some steps of its dtype; with "large", by a quarter."""
    factor = 1.25 if inputs == "large" else 1 + 16 * torch.finfo(torch.bfloat16).eps
    return planted(times(lambda P: factor, wrong), [Case(4, tokens, inputs=inputs, dtype=torch.bfloat16)])[0]


def unequal(*names):
    answers = planted(noise(*(names or EVERYTHING)), [Case(3, 19)])
    return [replace(each, question=replace(each.question, feature=UNEQUAL), raised=True) for each in answers]


P3, FULL, STRIPED = Case(3, 12), (False, "contiguous"), (True, "striped")
LATER_RANK, LATE_ROW, TWICE = (
    from_rank(lambda r, P: r + 1, "dk"),
    chunkwise(lambda x: x.roll(1, 2), "dq"),
    times(lambda P: 2, "dq"),
)
SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(0))
IN_PART, WHOLE = Question(Case(3, 18), members=(1, 2, 3)), Question(Case(3, 18))
LAST_PART, OWN_PART = (lambda part: part.rank < part.world_size - 1), (lambda part: part.rank == part.block)
TWO_WRONG = replace(home(lambda part: part.round > 0), add_q=lambda case, total, part: part)
OF_1_AND_2 = noise("out", where=lambda case, x: torch.arange(3).view(3, 1, 1, 1) > 0)
SOME_AND_ALL = lambda case, x: OF_1_AND_2(case, x) | noise("dv")(case, x)  # noqa: E731
NO_TRIANGLE = sees(lambda x: x.of(causal=False))(RIGHT)
EXCHANGED = sees(lambda x: x.of() if x.own else x.after)(RIGHT)
PLANTED = {  # what is planted, and in which cases
    "dk and dv times P": (times(lambda P: P, "dk", "dv"), {}),
    "dk over root P": (times(lambda P: P**-0.5, "dk"), {}),
    "minus out": (times(lambda P: -1, "out"), {}),
    "dq and dk over the scale": (times(lambda P: 2, "dq", "dk"), {}),
    "dv times the scale": (times(lambda P: 0.25, "dv"), {"head_dim": 16}),
    "dv times H/G": (times(lambda P: 3, "dv"), {"worlds": (2, 4), "heads": 6}),
    "dv over H/G": (times(lambda P: 1 / 3, "dv"), {"worlds": (2, 4), "heads": 6}),
    "dv times P/9": (times(lambda P: P / 9, "dv"), {}),
    "no gradients": (times(lambda P: 0, *GRADIENTS), {}),
    "lse in base 2": (times(lambda P: 1 / log(2), "lse"), {}),
    "dk and dv exchanged": (lambda case, x: {"dk": x["dv"], "dv": x["dk"]}, {}),
    "dk of the next rank": (LATER_RANK, {}),
    "out of the rank before": (from_rank(lambda r, P: r - 1, "out"), {}),
    "rows of dk from the last to the first": (chunkwise(lambda x: x.flip(2), "dk"), {}),
    "dq a row too late": (LATE_ROW, {}),
    "dk a row too early": (chunkwise(lambda x: x.roll(-1, 2), "dk"), {}),
    "dv shuffled": (only("dv", lambda x: x[:, :, SHUFFLED]), {"worlds": (4,)}),
    "dv shuffled in float32": (shuffled_in_float32, {"worlds": (4,), "inputs": "large"}),
    "out in 16 bits": (small(2**-8), {}),
    "dq in bfloat16": (only("dq", lambda x: x.bfloat16().double()), {}),
    "a NaN under a mask": (one_nan, {"masks": [(True, "zigzag")]}),
    "a NaN": (one_nan, {}),
    "NaN of large scores": (times(lambda P: torch.nan, "out"), {"inputs": "large"}),
    "dk NaN": (times(lambda P: torch.nan, "dk"), {}),
    **{
        f"noise in {', '.join(names)}": (noise(*names), {})
        for names in (("dq",), ("dk", "dv"), ("dq", "dk"), GRADIENTS)
    },
    **{f"noise in {', '.join(names)}": (noise(*names), {}) for names in (("lse",), ("out",), EVERYTHING)},
    "noise in out, and dq times 3": (lambda case, x: noise("out")(case, x) | {"dq": 3 * x["dq"]}, {}),
    "dq off by more than rounding in float32": (more_than_rounding, {}),
    "out off by more than rounding": (little_noise, {}),
    "out off by more than 16 bits": (small(2**-2), {}),
    "dq nearly times P": (times(lambda P: 1.001 * P, "dq"), {}),
    "dq nearly over root P": (times(lambda P: 1.001 * P**-0.5, "dq"), {}),
    "dq nearly 0": (times(lambda P: 1e-3, "dq"), {}),
    "noise in all heads but the first": (noise("out", where=heads(1, 2)), {"heads": 3, "kv_heads": 3}),
    "noise in heads 1 and 4 of 6": (noise("out", where=heads(1, 4)), {"worlds": (3, 4), "heads": 6, "kv_heads": 2}),
    "noise in head 0 of 3": (noise("out", where=heads(0)), {"heads": 3, "kv_heads": 3}),
    "noise in heads 2 to 5 of 6": (noise("out", where=heads(2, 3, 4, 5)), {"worlds": (3,), "heads": 6}),
    "heads added up": (only("out", lambda x: x.cumsum(1)), {"heads": 3, "kv_heads": 3}),
    "nothing": (lambda case, x: {}, {}),
    "noise in dq and dk, where 0 is right": (noise("dq", "dk"), {"masks": [(True, "contiguous")], "window": 1}),
    "noise in dq of a batch": (noise("dq"), {"masks": [FULL, STRIPED], "batch": 2}),
    "noise in dk and dv of 4 heads": (noise("dk", "dv"), {"masks": [FULL, STRIPED], "heads": 4}),
    "noise in gradients of one token": (noise(*GRADIENTS), {"masks": [FULL, STRIPED], "chunk": 1}),
    "noise in float32": (noise(*EVERYTHING), {"masks": [FULL, STRIPED], "dtype": torch.float32}),
    "dq and dk with the usual scale": (usual_scale, {"scale": 0.3}),
    "dv times P on one rank too": (times(lambda P: P, "dv"), {"worlds": (1, 2)}),
    "dv, a mean over the batch": (lambda case, x: {"dv": x["dv"] / case.batch}, {"batch": 3}),
    "dq times 2 on two ranks": (TWICE, {"worlds": (2,)}),
    "dq times 2, dv times 0 on 3 ranks": (zero_on_3_ranks, {}),
}
PATTERNS = {"P times": times(lambda P: P, "dq"), "a row too late": LATE_ROW, "dk": lambda case, x: {"dq": x["dk"]}}
PATTERNS |= {"in bfloat16": PLANTED["dq in bfloat16"][0], "of head 1": noise("dq", where=heads(1))}
XRAYED = ["last_block_skipped", "own_queries_only", "gradients_travel_other_way", "lse_of_the_block", "own_block_twice"]
XRAYED += ["diagonal_hidden", "key_lost_at_a_border", "averages_added"]
TOLD_OF = {  # the answers, or these and an X-ray
    **{name: lambda row=row: planted(row[0], cases(**row[1])) for name, row in PLANTED.items()},
    **{
        f"dq is {name}, but with {P} ranks": but_with(P, change) for name, change in PATTERNS.items() for P in (2, 3, 4)
    },
    "all heads but the first, and one head": lambda: (
        planted(noise("out", where=heads(1, 2)), cases(heads=3, kv_heads=3))
        + planted(noise("out"), cases(heads=1, kv_heads=1))
    ),
    **{f"sequences {wrong} of 3": sequences(*wrong) for wrong in ((1, 2), (1,), (0, 1, 2))},
    "sequences 1 and 2 of out, and all of dv": lambda: planted(SOME_AND_ALL, cases(batch=3)),
    "sequences 1 and 2, and one alone": lambda: sequences(1, 2)() + planted(noise("out")),
    "dv times 2 on one rank too": lambda: planted(times(lambda P: 2, "dv"), [Case(1, 18), Case(1, 1), *cases()]),
    "one rank with grouped queries, three always": lambda: (
        planted(noise(*EVERYTHING), [Case(1, 18, heads=4, kv_heads=2), Case(3, 18)])
        + planted(lambda case, x: {}, [Case(1, 6)])
    ),
    "dk times 2 on one rank too, and out of later questions": lambda: (
        planted(times(lambda P: 2, "dk"), [Case(1, 18), Case(3, 18)]) + planted(noise("out"), [Case(3, 24)])
    ),
    "out of a batch, and dq of 2, 3 and 4 ranks": lambda: (
        planted(noise("out"), cases(batch=2)) + planted(noise("dq")) + planted(lambda *_: {}, [Case(1, 6), Case(5, 30)])
    ),
    "all of a batch, and gradients": lambda: planted(noise(*EVERYTHING), cases(batch=2)) + planted(noise(*GRADIENTS)),
    "dk of the next rank, and unequal chunks": lambda: planted(LATER_RANK) + planted(noise("dk"), [Case(3, 19)]),
    "dq times 2, and answers that change": lambda: (
        planted(TWICE) + [replace(each, changes=True) for each in planted(noise("dq"))]
    ),
    "answers that change": lambda: [replace(each, changes=True) for each in planted(noise("dq"))],
    "dq times 2, and what was never claimed": lambda: planted(TWICE) + unequal(),
    "dq imprecise": lambda: [imprecise("normal", "dq")],
    "dq of many tokens imprecise": lambda: [imprecise("normal", "dq", 260)],
    "dq of few tokens too": lambda: [imprecise("normal", "dq", tokens) for tokens in (260, 256)],
    "dk and out imprecise": lambda: [imprecise("normal", "dk"), imprecise("normal", "out")],
    "large out imprecise": lambda: [imprecise("large", "out")],
    "large out and dv imprecise": lambda: [imprecise("large", "out"), imprecise("normal", "dv")],
    "fails in a part of a job": lambda: [Answer(IN_PART, FAILED, "no")],
    "wrong in a part of a job, and imprecise": lambda: (
        [replace(it, question=IN_PART) for it in planted(noise("dq"), [IN_PART.case])] + [imprecise("normal", "out")]
    ),
    "fails everywhere": lambda: [Answer(IN_PART, FAILED, "no"), Answer(WHOLE, FAILED, "no")],
    **{f"X-ray of {name}": seen(replace(P3, causal=name == "diagonal_hidden"), name) for name in XRAYED},
    **{
        f"X-ray of one rank of {P}": seen(Case(P, 4 * P), home(lambda it: LAST_PART(it) or OWN_PART(it)))
        for P in (3, 4)
    },
    "X-ray of documents": seen(Case(3, 12, documents=(5, 7)), "documents_end_with_the_chunk"),
    "X-ray of a window": seen(Case(3, 12, True, window=3), "window_one_less"),
    "X-ray of documents without a causal mask": seen(replace(P3, causal=True, documents=(5, 7)), NO_TRIANGLE),
    "X-ray of blocks taken for each other": seen(replace(P3, causal=True), EXCHANGED),
    "X-ray of a mask that nobody asked for": seen(P3, "causal_unasked"),
    "X-ray of gradients of key 0": changed_xray(key_0_thrice),
    "X-ray of v of key 0": changed_xray(value_0_thrice),
    "X-ray of known dq and dk": lambda: (planted(PLANTED["dq and dk over the scale"][0]), changed_xray(known)()[1]),
    "X-ray of dq and dv, each in its own way": seen(P3, TWO_WRONG),
    "X-ray without later ranks": seen(P3, sees(lambda x: x.seen & (not x.after))(RIGHT)),
    "X-ray of these, and averages added": seen(P3, CATALOGUE["averages_added"].variants[0](TWO_WRONG)),
}
CALLED = "barrier broadcast_object_list reduce reduce_scatter_tensor all_to_all_single gather_object scatter"
SEND, RECEIVE, WAIT, SUM = ("dist.send(k, right)", "dist.recv(k, left)", "work.wait()", "dist.all_reduce(k)")
HANGS = {  # which ranks wait where, and which are late
    "all send": ({"012": SEND}, 0, 1, 2),
    "all receive": ({"012": RECEIVE}, 0, 1, 2),
    "one receives": ({"1": RECEIVE}, 1),
    "two send": ({"12": SEND}, 1, 2),
    "a collective and a receive": ({"02": SUM, "1": "dist.recv(k, 0)"}, 0, 1, 2),
    "all of a part gather": ({"123": "dist.all_gather(n, m)"}, 1, 2, 3),
    "one of a part receives": ({"3": RECEIVE}, 3),
    "one gathers": ({"1": "dist.all_gather_into_tensor(k, k)"}, 1),
    **{f"one is not in {of}": ({"02": f"dist.{of}(k)"}, 0, 2) for of in CALLED.split()},
    "two send, one receives": ({"01": SEND, "2": RECEIVE}, 0, 1, 2),
    "all wait": ({"012": WAIT}, 0, 1, 2),
    "two in a collective, one waits": ({"01": SUM, "2": WAIT}, 0, 1, 2),
    "two of three late ones send": ({"01": SEND}, 0, 1, 2),
    "isend": ({"012": "dist.isend(k, right).wait()"}, 0, 1, 2),
    "send or receive": ({"012": "dist.send(k, 1) if even else dist.recv(k, 0)"}, 0, 1, 2),
}
INFERRED = Path(__file__).with_name("inferred.txt")  # python -m tests.doctor.test_inference writes it


def told_of(name):
    found = TOLD_OF[name]()
    answers, xray = found if isinstance(found, tuple) else (found, NO_XRAY)
    return "\n    ".join([name, *map(str, infer(Examination(PATIENT, answers), xray))]) + "\n\n"


@pytest.mark.parametrize("name", TOLD_OF)
def test_what_is_told(name):
    """Patterns are told and no others, what the others need is told first, and a right ring gets no sentence."""
    assert told_of(name) in INFERRED.read_text()


@pytest.mark.parametrize("name", HANGS)
def test_what_is_told_of_a_hang(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"{name}: {hang(*HANGS[name])}\n" in INFERRED.read_text()


def of_states(*pairs):
    return Examination(PATIENT, [Answer(question, state, results={"out": torch.zeros(1)}) for question, state in pairs])


@pytest.mark.parametrize(("inputs", "told"), [("normal", ["scale", "1/2"]), ("large", [])])
def test_no_factor_is_told_where_any_would_fit(inputs, told):
    """With large scores rounding may move dq by more than its largest number."""
    question = Question(Case(3, 18, inputs=inputs))
    half = Answer(question, WRONG, wrong={"dq": 9.0}, results={"dq": right_results(question)["dq"].exact / 2})
    factors = next(pattern for pattern in CONTENTS if "times the right numbers" in pattern.says)
    assert [fact.words for fact in replace(factors, clear=False).common([WrongAnswer(half)], "dq")] == told


def test_the_question_of_an_xray():
    two, three = Question(Case(2, 12)), Question(Case(3, 18, True, "zigzag"))
    batch = Question(Case(3, 18, batch=2))
    alone = Question(Case(3, 18), "without gradients")
    narrow = Question(Case(4, 24, dtype=torch.bfloat16))
    sinks = Question(Case(3, 18, sinks=True))
    wrong = lambda *of: choose_question(of_states(*[(each, WRONG) for each in of]))  # noqa: E731
    assert wrong(batch, two, three, alone).case == Case(3, 12, True, "zigzag", heads=1, kv_heads=1, head_dim=12)
    assert wrong(batch, alone).how == "without gradients"
    assert wrong(batch, narrow).case.dtype == torch.bfloat16
    assert wrong(narrow, replace(three, members=(1, 2, 3)), two) == wrong(two)
    assert wrong(batch).case.batch == 1
    few = of_states((three, WRONG), (batch, WRONG)).answers
    few = [replace(it, wrong={"out": 9.0}, relative={"out": x}) for it, x in zip(few, (0.002, 0.5), strict=True)]
    assert choose_question(Examination(PATIENT, few)).case.layout == "contiguous", "no rounding"
    assert not wrong(sinks).case.sinks
    assert not wrong(Question(Case(3, 18, True, window=8)), Question(Case(3, 18, True))).case.window
    assert wrong(Question(Case(3, 19))).case.seq_len == 19, "unequal chunks stay unequal"
    assert wrong(Question(Case(3, 3))).case.seq_len == 3
    assert wrong(Question(Case(3, 21))).case.seq_len == 21
    assert wrong(Question(Case(3, 3 * 257))).case.seq_len == 12
    odd = Case(3, 18, documents=(7, 11), head_dim=8, inputs="large", value_dim=4, scale=0.3)
    plainly = Case(3, 12, documents=(5, 7), head_dim=16, heads=1, kv_heads=1, scale=0.3)
    assert wrong(Question(odd, "views")) == Question(plainly)
    for chunk, taken in ((5, 4), (8, 8), (16, 16), (17, 4), (20, 4)):  # another one than usual is one that a ring needs
        answers = [Answer(Question(Case(3, 3 * 22)), WRONG, results={"out": torch.zeros(1)})]
        patient = replace(PATIENT, chunk=chunk, layouts=LAYOUTS[:1])
        assert choose_question(Examination(patient, answers)).case.seq_len == 3 * taken


def hang(waits, *late):
    """What is told of 3 ranks, 0 to 2 or 1 to 3, of which these wait in these lines of code, and some are late."""
    Path("ring.py").write_text("\n".join(waits.values()) + "\n")
    linecache.clearcache()
    lines = {("ring.py", i + 1, "attention"): list(map(int, ranks)) for i, ranks in enumerate(waits)}
    return str(inferred(Answer(IN_PART if 3 in late else WHOLE, FAILED, silent=late, waits=lines)) or "-")


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    hangs = [f"{name}: {hang(*how)}\n" for name, how in HANGS.items()]
    INFERRED.write_text("".join([*map(told_of, TOLD_OF), *hangs]))

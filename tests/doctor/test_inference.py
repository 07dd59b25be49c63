"""A pattern that is planted into right numbers is told. Random numbers show no pattern, and right rings no sentence."""

import linecache
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from ring_doctor.asking.answers import FAILED, OK, WRONG, Answer, judge
from ring_doctor.asking.calls import RankResults
from ring_doctor.asking.case import Case
from ring_doctor.asking.examination import Examination
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import UNEQUAL, Question
from ring_doctor.assertion import choose_question
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.facts import OF_GRADIENTS
from ring_doctor.explaining.inference import infer, text
from ring_doctor.explaining.inference import waiting as inferred
from ring_doctor.explaining.xray import cases as runs_of
from ring_doctor.explaining.xray import on_paper, xray_of
from ring_doctor.mistakes.paper_ring import RIGHT, compute
from tests.doctor.examined import answer_on_paper
from tests.doctor.odd_patients import right

PATIENT = patient_of(right)
NO_XRAY = "none was taken"
GRADIENTS = ("dq", "dk", "dv")
EVERYTHING = ("out", "lse", *GRADIENTS)


def cases(worlds=(2, 3, 4), masks=((False, "contiguous"), (True, "zigzag")), chunk=6, **features):
    return [Case(P, chunk * P, *mask, **features) for P in worlds for mask in masks]


def planted(change, of=None, how="plain"):
    """Answers with the right numbers, changed by change(case, results) -> {name: changed result}."""
    answers = []
    for case in of or cases():
        exact = {name: x.exact.clone() for name, x in case.right().items()}
        results = {name: x.to(case.dtype) for name, x in (exact | change(case, exact)).items()}
        chunks = [{name: case.cut(x, rank) for name, x in results.items()} for rank in range(case.world_size)]
        answers.append(judge(Question(case, how), [RankResults(chunk) for chunk in chunks]))
    return answers


def with_steps(steps, of=None):
    return [answer_on_paper(Question(case), steps) for case in of or cases()]


def told(answers, xray=NO_XRAY):
    return infer(Examination(PATIENT, answers), xray)


def times(c, *names):
    """c times the right numbers, where c(r, P) is the factor of rank r."""

    def change(case, x):
        P = case.world_size
        return {name: case.join([c(r, P) * case.cut(x[name], r) for r in range(P)]) for name in names}

    return change


def only(name, change):
    return lambda case, x: {name: change(x[name])}


def chunkwise(move, *names):
    def change(case, x):
        return {name: case.join([move(case.cut(x[name], r)) for r in range(case.world_size)]) for name in names}

    return change


def from_rank(rank, *names):
    """The chunk of rank(r) of P ranks on rank r."""

    def change(case, x):
        P = case.world_size
        return {name: case.join([case.cut(x[name], rank(r, P) % P) for r in range(P)]) for name in names}

    return change


def noise(*names, where=lambda case, x: torch.ones_like(x, dtype=torch.bool)):
    """Random numbers added to these results, in the places that `where` names."""

    def change(case, x):
        generator = torch.Generator().manual_seed(case.world_size + case.seq_len)
        random = {name: torch.randn(x[name].shape, generator=generator, dtype=torch.float64) for name in names}
        return {name: torch.where(where(case, x[name]), x[name] + random[name], x[name]) for name in names}

    return change


def turned(x):
    B, H, C, D = x.shape
    return x.reshape(B, C, H, D).transpose(1, 2)


def small(c):
    """Relative errors of up to c / 2, each another."""
    generator = torch.Generator().manual_seed(0)
    return only("out", lambda x: x * (1 + c * (torch.rand(x.shape, generator=generator).double() - 0.5)))


def rising(case):
    """A factor for each row."""
    return torch.linspace(0.5, 2.0, case.seq_len, dtype=torch.float64)[:, None]


def nan_in_hidden_blocks(case, x):
    sees = [case.visible()[:, case.positions(block)].any(dim=1) for block in range(case.world_size)]
    lacks = ~torch.stack(sees).all(dim=0)
    return {"out": torch.where(lacks[:, None], torch.nan, x["out"])}


OF_LATER = {"worlds": (3, 4), "masks": [(True, "contiguous")]}
SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(0))
PLANTED = [  # what is told, what is planted, and in which cases
    ("In dk and dv all numbers are P times the right numbers. Look at", times(lambda r, P: P, "dk", "dv"), {}),
    ("In dk all numbers are 1/√P times the right", times(lambda r, P: P**-0.5, "dk"), {}),
    ("In out all numbers are -1 times the right", times(lambda r, P: -1, "out"), {}),
    ("In dq and dk all numbers are 1/scale or 2 times the right", times(lambda r, P: 2, "dq", "dk"), {}),
    ("In dv all numbers are scale times the right", times(lambda r, P: 0.25, "dv"), {"head_dim": 16}),
    ("In dv all numbers are H/G times the right", times(lambda r, P: 3, "dv"), {"worlds": (2, 4), "heads": 6}),
    ("In dv all numbers are G/H times the right", times(lambda r, P: 1 / 3, "dv"), {"worlds": (2, 4), "heads": 6}),
    ("In dv all numbers are c times the right numbers (P = 2,", times(lambda r, P: 0.1 * P, "dv"), {}),
    ("In dq, dk and dv all numbers are 0. Look at detach", times(lambda r, P: 0, *GRADIENTS), {}),
    ("In lse all numbers are 1/log 2 times the right", times(lambda r, P: 1 / log(2), "lse"), {}),
    ("The numbers of dk are those of the right dv.", lambda case, x: {"dk": x["dv"], "dv": x["dk"]}, {}),
    ("In dk rank r has the right numbers of rank r + 1. Look at the hops", from_rank(lambda r, P: r + 1, "dk"), {}),
    ("In out rank r has the right numbers of rank r - 1. Look at the rank", from_rank(lambda r, P: r - 1, "out"), {}),
    ("has the right numbers of rank P - 1 - r.", from_rank(lambda r, P: P - 1 - r, "dq"), {"worlds": (3, 4)}),
    ("the right heads are in the reverse order or moved on by one", only("out", lambda x: x.flip(1)), {}),
    ("In dq the right numbers are one row too late in each chunk", chunkwise(lambda x: x.roll(1, 2), "dq"), {}),
    ("(B, C, H, ...) and read as (B, H, C, ...)", chunkwise(lambda x: x.transpose(1, 2).reshape(x.shape), "out"), {}),
    ("(B, H, C, ...) and read as (B, C, H, ...)", chunkwise(turned, "out"), {}),
    ("one row too early in each chunk", chunkwise(lambda x: x.roll(-1, 2), "dk"), {}),
    ("in the reverse order of rows in each chunk", chunkwise(lambda x: x.flip(2), "dk"), {}),
    ("in the other half of each chunk", chunkwise(lambda x: torch.cat([x[:, :, 3:], x[:, :, :3]], 2), "dv"), {}),
    ("are in other places of their chunk", chunkwise(lambda x: x[:, :, [3, 1, 4, 0, 5, 2]], "dv"), {}),
    ("are in other places of the whole", only("dv", lambda x: x[:, :, SHUFFLED]), {"worlds": (4,)}),
    ("out: the errors are as small as roundings to 16 bits. Look at casts to 16 bits", small(2**-8), {}),
    ("NaN or infinite in the queries that see no key of some block.", nan_in_hidden_blocks, OF_LATER),
    ("NaN or infinite where scores are large.", times(lambda r, P: torch.nan, "out"), {"inputs": "large"}),
    ("In dk numbers are NaN or infinite everywhere.", times(lambda r, P: torch.nan, "dk"), {}),
    *[(said, noise(*names.replace(" and", ",").split(", ")), {}) for names, said in OF_GRADIENTS.items()],
    ("out is right and lse is wrong", noise("lse"), {}),
    ("lse is right, so each query has the right scores", noise("out"), {}),
    ("out is wrong and all gradients are right", noise("out"), {}),
    ("Mend out first", noise(*EVERYTHING), {}),
]


@pytest.mark.parametrize(("says", "change", "features"), PLANTED)
def test_a_planted_pattern_is_told(says, change, features):
    sentences = told(planted(change, cases(**features)))
    assert any(says in sentence for sentence in sentences), text(sentences)


def test_what_the_others_need_is_told_first():
    """A pattern comes before which results are wrong. Gradients that follow from a wrong out come last."""
    sentences = told(planted(times(lambda r, P: P, "dk", "dv")))
    assert [sentence[:12] for sentence in sentences] == ["In dk and dv", "dq is right,"]
    sentences = told(planted(lambda case, x: noise("out")(case, x) | {"dq": 3 * x["dq"]}))
    assert "c times" in sentences[-1]
    assert sentences[0].startswith("lse is right")


@pytest.mark.parametrize(
    ("change", "alone"),
    [
        (
            lambda case, x: {"dq": x["dq"] + 4 * replace(case, dtype=torch.float32).right()["dq"].allowed},
            "right numbers",
        ),
        (lambda case, x: {"out": x["out"] + 4e-6 * noise("out")(case, {"out": 0 * x["out"]})["out"]}, "roundings"),
        (small(2**-2), "roundings"),
        (times(lambda r, P: 1.001 * P, "dq"), "P times"),
        (times(lambda r, P: 1.001 * P**-0.5, "dq"), "√P times"),
        (times(lambda r, P: 1e-3, "dq"), "are 0"),
    ],
)
def test_what_is_near_a_pattern_and_is_none(change, alone):
    """Errors little more than rounding, between or beyond the roundings of two dtypes; factors off by a thousandth."""
    answers = planted(change)
    assert all(answer.state == WRONG for answer in answers)
    assert not any(alone in sentence for sentence in told(answers)), text(told(answers))


def rank_is(rank):
    def where(case, x):
        at = torch.zeros(case.seq_len, dtype=torch.bool)
        at[case.positions(rank % case.world_size)] = True
        return at.view(-1, *[1] * (x.dim() - 3)).expand_as(x)

    return where


def chunk_row(index):
    def where(case, x):
        at = torch.zeros(case.seq_len, dtype=torch.bool)
        for rank in range(case.world_size):
            at[case.positions(rank)[index]] = True
        return at.view(-1, *[1] * (x.dim() - 3)).expand_as(x)

    return where


def along(dim, index):
    """Where the index of this dimension is one of these."""

    def where(case, x):
        at = torch.zeros(x.shape[dim], dtype=torch.bool)
        at[index] = True
        return at.view([-1 if i == dim else 1 for i in range(x.dim())]).expand_as(x)

    return where


GROUPED = cases((3, 4), heads=6, kv_heads=2)


@pytest.mark.parametrize(
    ("where", "of", "says"),
    [
        (rank_is(0), None, "on these ranks: the first"),
        (along(0, [1]), cases(batch=2), "in these sequences: the second"),
        (along(1, [1, 2]), cases(heads=3, kv_heads=3), "in these heads: all but the first"),
        (along(1, [1, 2, 4, 5]), GROUPED, "in these heads: all but the first of a group"),
        (along(1, [1, 4]), GROUPED, "in these heads: those whose h mod G is not h // (H/G)"),
        (chunk_row(0), None, "in these rows of each chunk: the first"),
        (chunk_row(slice(3, None)), None, "in these rows of each chunk: the last half"),
        (chunk_row(slice(32, None)), cases((3,), chunk=70), "in these rows of each chunk: from 32 on"),
    ],
)
def test_the_place_of_random_errors(where, of, says):
    sentences = told(planted(noise("out", where=where), of))
    assert [sentence for sentence in sentences if sentence.startswith(f"out: wrong {says}")], text(sentences)


def test_one_number_of_ranks_does_not_tell_rank_1_from_odd_ranks():
    places = [told(planted(noise("out", where=rank_is(1)), cases(worlds)))[-1] for worlds in ((3,), (3, 5), (3, 4))]
    assert [said.partition(". Look")[0] for said in places] == [
        "out: wrong on these ranks: the second or on these ranks: the odd ones",
        *2 * ["out: wrong on these ranks: the second"],
    ]


def test_a_right_ring_gets_no_sentence():
    answers = with_steps(RIGHT)
    assert all(answer.state == OK for answer in answers)
    assert told(answers) == []
    assert text(told(answers)) == ""


@pytest.mark.parametrize(
    ("names", "features"),
    [
        (("dq",), {"batch": 2}),
        (("dk", "dv"), {"heads": 4}),
        (GRADIENTS, {"chunk": 1}),
        (EVERYTHING, {"dtype": torch.float32}),
    ],
)
def test_random_errors_get_the_generic_sentence_alone(names, features):
    mask = [(False, "contiguous"), (True, "striped")]
    assert len(told(planted(noise(*names), cases((2, 3, 4), mask, **features)))) == 1


@pytest.mark.parametrize(
    "change",
    [
        times(lambda r, P: P, "dq"),
        chunkwise(lambda x: x.roll(1, dims=2), "dq"),
        only("dq", lambda x: x.bfloat16().double()),
        noise("dq", where=rank_is(0)),
        lambda case, x: {"dq": x["dk"]},
    ],
)
def test_a_pattern_of_some_answers_is_not_told_as_general(change):
    everywhere = told(planted(change))
    assert len(everywhere) == 2, text(everywhere)
    for P in (2, 3, 4):
        mixed = planted(lambda case, x, P=P: (noise("dq") if case.world_size == P else change)(case, x))
        assert told(mixed) == [OF_GRADIENTS["dq"]], text(told(mixed))


def test_two_ranks_do_not_tell_p_from_2():
    twice = times(lambda r, P: 2, "dq")
    assert "P or 1/scale or 2 times" in told(planted(twice, cases((2,))))[0]
    assert "1/scale or 2 times" in told(planted(twice, cases((2,)) + cases((3,))))[0]
    assert "P or" not in told(planted(twice, cases((2,)) + cases((3,))))[0]


def test_numbers_of_patterns_do_not_count_where_they_are_right():
    """dv is wrong with 3 ranks only. What is told of dv is true where dv is wrong."""

    def change(case, x):
        return {"dq": 2 * x["dq"]} | ({"dv": 0 * x["dv"]} if case.world_size == 3 else {})

    sentences = told(planted(change))
    assert any(sentence.startswith("In dv all numbers are 0.") for sentence in sentences)
    assert OF_GRADIENTS["dq and dv"] in sentences


def home(kept):
    return replace(RIGHT, home=lambda part: part.block if kept(part) else None)


def last_key_hidden(case, rank, block):
    seen = RIGHT.sees(case, rank, block).clone()
    seen[:, -1] &= block == rank
    return seen


def with_d_v(change):
    """Two runs in which dV is change(case, weights) @ dO, or of another dO."""

    def results(case):
        q, k, _, d_out = (x.double() for x in case.whole())
        weights = (q @ k.mT / case.head_dim**0.5).masked_fill(~case.visible(), -torch.inf).softmax(dim=-1)
        return compute(case) | {"dv": change(case, weights).mT @ d_out}

    return xray_of(*map(results, runs_of(Case(3, 12))), Case(3, 12))


def of_catalogue(name, case):
    return lambda: on_paper(case, CATALOGUE[name].variants[0](RIGHT))


P3 = Case(3, 12)


@pytest.mark.parametrize(
    ("xray", "says", "look"),
    [
        (home(lambda part: part.round < part.world_size - 1), "round 2 on every rank: missing", "the number of rounds"),
        (home(lambda part: part.round > 0), "round 0 on every rank: missing", "the number of rounds"),
        (home(lambda part: part.round == 0), "rounds 1, 2 on every rank: missing", "the number of rounds"),
        (
            home(lambda part: part.rank < 2 or part.rank == part.block),
            "round 1 on rank 2; round 2 on rank 2: missing",
            "the number of rounds",
        ),
        (
            replace(RIGHT, home=lambda part: (2 * part.rank - part.block) % part.world_size),
            "round 2 on every rank: what belongs to KV(j + 1); round 1 on every rank: what belongs to KV(j + 2)",
            "the hops",
        ),
        (
            lambda: with_d_v(lambda case, weights: weights * rising(case)),
            "all tiles: scaled, each query by its own factor: by 0.5 to 2",
            "the lse that the backward pass gets",
        ),
        (
            replace(RIGHT, add_q=lambda case, total, part: 2 * part if total is None else total + part),
            "round 0 on every rank: counted twice",
            "the number of rounds, and at the start of the sums",
        ),
        (of_catalogue("last_block_skipped", P3), "round 2 on every rank: missing", "the number of rounds"),
        (
            of_catalogue("diagonal_hidden", replace(P3, causal=True)),
            "round 0 on every rank: a triangle without its diagonal instead of a triangle",
            "the mask",
        ),
        (replace(RIGHT, sees=last_key_hidden), "rounds 1, 2 on every rank: 4 pairs too few", "the mask"),
    ],
)
def test_what_an_xray_shows_is_told_with_where_to_look(xray, says, look):
    sentences = told(planted(noise(*EVERYTHING)), xray() if callable(xray) else on_paper(P3, xray))
    assert sentences[0].startswith("X-ray (P = 3, ")
    assert f"): {says}. Look at {look}" in sentences[0]
    assert sum("X-ray" in sentence for sentence in sentences) == 1


def test_each_matrix_of_the_backward_pass_that_is_wrong_in_its_own_way_is_told():
    steps = replace(home(lambda part: part.round > 0), add_q=lambda case, total, part: part)
    shown = [sentence.partition("): ")[2] for sentence in on_paper(P3, steps).facts()]
    assert [matrix.partition(",")[0] for matrix in shown] == ["W backward", "dS in dQ"]
    assert [sentence.partition("): ")[2] for sentence in on_paper(P3, steps).facts(known={"dv", "dq"})] == [
        sentence.partition(" Look")[0] for sentence in shown
    ]


def test_answers_that_change_or_were_never_claimed_prove_nothing():
    answers = planted(times(lambda r, P: 2, "dq"))
    changing = [replace(answer, changes=True) for answer in planted(noise("dq"))]
    assert told(answers + changing) == told(answers)
    assert told(changing) == []
    unequal = planted(noise(*EVERYTHING), [Case(3, 19)])
    unequal = [replace(answer, question=replace(answer.question, feature=UNEQUAL), raised=True) for answer in unequal]
    found = Examination(PATIENT, answers + unequal)
    assert infer(found, NO_XRAY) == told(answers + [a for a in unequal if a.question.feature not in found.beyond])


def of_states(*pairs):
    return Examination(PATIENT, [Answer(question, state, results={"out": torch.zeros(1)}) for question, state in pairs])


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
    assert wrong(batch).case.batch == 1
    assert not wrong(sinks).case.sinks
    assert wrong(Question(Case(3, 19))).case.seq_len == 19, "unequal chunks stay unequal"
    assert wrong(Question(Case(3, 3))).case.seq_len == 3
    assert wrong(Question(Case(3, 21))).case.seq_len == 21
    assert wrong(Question(Case(3, 3 * 257))).case.seq_len == 12


def hang(lines, late, P=3):
    """What a job says of ranks that wait in these lines of code."""
    Path("ring.py").write_text("\n".join(lines.values()) + "\n")
    linecache.clearcache()
    waits = [
        f"rank{'s' * (',' in ranks)} {ranks} in ring.py, line {i + 1} in attention" for i, ranks in enumerate(lines)
    ]
    says = "; ".join([f"rank(s) {late} did not answer in time", *waits])
    return inferred(Answer(Question(Case(P, 6 * P)), FAILED, says))


@pytest.mark.parametrize(
    ("lines", "late", "says"),
    [
        ({"0, 1, 2": "    dist.send(k, right)"}, [0, 1, 2], "Every rank waits in a send, and no rank receives"),
        ({"0, 1, 2": "    dist.recv(k, left)"}, [0, 1, 2], "Every rank waits in a receive"),
        ({"1": "    dist.recv(k, left)"}, [1], "rank 1 waits for a message that no rank sends"),
        ({"0, 2": "    dist.all_reduce(k)", "1": "dist.recv(k, 0)"}, [0, 1, 2], "Ranks 0, 2 wait in all_reduce,"),
        ({"1": "    dist.all_gather_into_tensor(k, k)"}, [1], "Rank 1 waits in all_gather, and ranks 0, 2 are"),
        ({"0, 1": "    dist.send(k, right)", "2": "    dist.recv(k, left)"}, [0, 1, 2], ""),
        ({"0, 1, 2": "    work.wait()"}, [0, 1, 2], ""),
        ({"0, 1": "    dist.all_reduce(k)", "2": "    work.wait()"}, [0, 1, 2], ""),
        ({"0, 1": "    dist.send(k, right)"}, [0, 1, 2], ""),
        ({"0, 1, 2": "    dist.isend(k, right).wait()"}, [0, 1, 2], ""),
        ({"0, 1, 2": "    dist.send(k, 1) if even else dist.recv(k, 0)"}, [0, 1, 2], ""),
    ],
)
def test_a_hang(tmp_path, monkeypatch, lines, late, says):
    monkeypatch.chdir(tmp_path)
    said = hang(lines, late)
    assert said.startswith(says) if says and says[0].isupper() else says in said
    assert bool(said) == bool(says)


def imprecise(inputs, wrong):
    """An answer in bfloat16 whose result `wrong` is off by some steps of its dtype; with "large", by a quarter."""
    case = Case(4, 32, inputs=inputs, dtype=torch.bfloat16)
    factor = 1.25 if inputs == "large" else 1 + 16 * torch.finfo(torch.bfloat16).eps
    results = {name: (factor if name == wrong else 1) * case.right()[name].exact for name in ("out", *GRADIENTS)}
    chunks = [{name: case.cut(x, rank).to(case.dtype) for name, x in results.items()} for rank in range(4)]
    return judge(Question(case), [RankResults(chunk) for chunk in chunks])


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([imprecise("normal", "dq")], ["dq is rounded to 16 bits too often: look at the dtype of the sum of dQ"]),
        ([imprecise("normal", "dk"), imprecise("normal", "out")], ["out is rounded", "dk is rounded"]),
        ([imprecise("large", "out")], ["Scores of some hundreds show it"]),
        ([imprecise("large", "out"), imprecise("normal", "dv")], ["Scores of some hundreds", "dv is rounded"]),
    ],
)
def test_what_is_only_imprecise_is_told_as_rounding_and_nothing_else(answers, says):
    assert all(answer.state == WRONG for answer in answers)
    found = told(answers)
    assert len(found) == len(says)
    assert all(sentence.startswith(start) for sentence, start in zip(found, says, strict=True))


def test_what_fails_in_a_part_of_the_job_only():
    part, whole = Question(Case(3, 18), members=(1, 2, 3)), Question(Case(3, 18))
    assert "only where its group is a part of the job" in told([Answer(part, FAILED, "no")])[0]
    assert not told([Answer(part, FAILED, "no"), Answer(whole, FAILED, "no")])

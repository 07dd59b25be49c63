"""A pattern that is planted into right numbers is told. Random numbers show no pattern, and right rings no sentence."""

import linecache
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from ring_doctor.asking.answers import FAILED, OK, WRONG, Answer, Examination
from ring_doctor.asking.case import Case
from ring_doctor.asking.patient import patient_of
from ring_doctor.asking.questions import UNEQUAL, Question
from ring_doctor.assertion import choose_question
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.explaining.facts import of_gradients
from ring_doctor.explaining.inference import infer, text
from ring_doctor.explaining.inference import waiting as inferred
from ring_doctor.explaining.xray import cases as cases_of_xray
from ring_doctor.explaining.xray import on_paper, xray_of
from ring_doctor.mistakes.paper_ring import RIGHT, compute
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


def told(answers, xray=NO_XRAY):
    return list(map(str, infer(Examination(PATIENT, answers), xray)))


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


SHUFFLED = torch.randperm(24, generator=torch.Generator().manual_seed(0))
PLANTED = [  # what is told, what is planted, and in which cases
    ("In dk and dv all numbers are P times the right numbers. Look at", times(lambda P: P, "dk", "dv"), {}),
    ("In dk all numbers are 1/√P times the right", times(lambda P: P**-0.5, "dk"), {}),
    ("In out all numbers are -1 times the right", times(lambda P: -1, "out"), {}),
    ("In dq and dk all numbers are 1/scale or 2 times the right", times(lambda P: 2, "dq", "dk"), {}),
    ("In dv all numbers are scale times the right", times(lambda P: 0.25, "dv"), {"head_dim": 16}),
    ("In dv all numbers are H/G times the right", times(lambda P: 3, "dv"), {"worlds": (2, 4), "heads": 6}),
    ("In dv all numbers are G/H times the right", times(lambda P: 1 / 3, "dv"), {"worlds": (2, 4), "heads": 6}),
    (
        "c times the right numbers. Look at what this result is multiplied by: by 0.222 with P = 2",
        times(lambda P: P / 9, "dv"),
        {},
    ),
    ("In dq, dk and dv all numbers are 0 times the right", times(lambda P: 0, *GRADIENTS), {}),
    ("In lse all numbers are 1/log 2 times the right", times(lambda P: 1 / log(2), "lse"), {}),
    ("The numbers of dk are those of the right dv.", lambda case, x: {"dk": x["dv"], "dv": x["dk"]}, {}),
    ("In dk rank r has the right numbers of rank r + 1. Look at the hops", from_rank(lambda r, P: r + 1, "dk"), {}),
    ("In out rank r has the right numbers of rank r - 1. Look at the rank", from_rank(lambda r, P: r - 1, "out"), {}),
    ("the right numbers are in other places of their chunk. Look at", chunkwise(lambda x: x.flip(2), "dk"), {}),
    ("In dq the right numbers are one row too late in each chunk", chunkwise(lambda x: x.roll(1, 2), "dq"), {}),
    ("one row too early in each chunk", chunkwise(lambda x: x.roll(-1, 2), "dk"), {}),
    ("are in other places of the whole", only("dv", lambda x: x[:, :, SHUFFLED]), {"worlds": (4,)}),
    ("out: the errors are as small as roundings to 16 bits. Look at casts to 16 bits", small(2**-8), {}),
    ("in some places. Look at the merge of a block of which a query", one_nan, {"masks": [(True, "zigzag")]}),
    ("NaN or infinite in some places, without a mask too. Look at exp, sums", one_nan, {}),
    ("NaN or infinite where scores are large.", times(lambda P: torch.nan, "out"), {"inputs": "large"}),
    ("In dk numbers are NaN or infinite everywhere, without a mask too.", times(lambda P: torch.nan, "dk"), {}),
    ("dq wrong, dk and dv right, so the weights p and dS are right. Look at dS K, and", noise("dq"), {}),
    ("dk and dv wrong, dq right, so the weights p and dS are right. Look at dSᵀ Q, its way", noise("dk", "dv"), {}),
    ("dq and dk wrong, dv right, so the weights p are right. Look at dS = p", noise("dq", "dk"), {}),
    ("out is right and all gradients are wrong. Look at what the backward pass gets", noise(*GRADIENTS), {}),
    ("out is right and lse is wrong", noise("lse"), {}),
    ("lse is right, so each query has the right scores", noise("out"), {}),
    ("out is wrong and all gradients are right", noise("out"), {}),
    ("Look at out first: all other results depend", noise(*EVERYTHING), {}),
]


@pytest.mark.parametrize(("says", "change", "features"), PLANTED)
def test_a_planted_pattern_is_told(says, change, features):
    sentences = told(planted(change, cases(**features)))
    assert any(says in sentence for sentence in sentences), text(sentences)


def test_what_the_others_need_is_told_first():
    """A pattern comes before which results are wrong. Gradients that follow from a wrong out come last."""
    sentences = told(planted(times(lambda P: P, "dk", "dv")))
    assert [sentence[:12] for sentence in sentences] == ["In dk and dv", "dk and dv wr"]
    sentences = told(planted(lambda case, x: noise("out")(case, x) | {"dq": 3 * x["dq"]}))
    assert "3 times" in sentences[-1]
    assert sentences[0].startswith("out is wrong and lse is right")


@pytest.mark.parametrize(
    ("change", "alone"),
    [
        (
            lambda case, x: {"dq": x["dq"] + 4 * replace(case, dtype=torch.float32).right()["dq"].allowed},
            "right numbers",
        ),
        (lambda case, x: {"out": x["out"] + 4e-6 * noise("out")(case, {"out": 0 * x["out"]})["out"]}, "roundings"),
        (small(2**-2), "roundings"),
        (times(lambda P: 1.001 * P, "dq"), "P times"),
        (times(lambda P: 1.001 * P**-0.5, "dq"), "√P times"),
        (times(lambda P: 1e-3, "dq"), "are 0 "),
    ],
)
def test_what_is_near_a_pattern_and_is_none(change, alone):
    """Errors little more than rounding, between or beyond the roundings of two dtypes; factors off by a thousandth."""
    answers = planted(change)
    assert all(answer.state == WRONG for answer in answers)
    assert not any(alone in sentence for sentence in told(answers)), text(told(answers))


def heads(*numbers):
    """Where the query head is one of these."""
    return lambda case, x: torch.isin(torch.arange(x.shape[1]), torch.tensor(numbers))[:, None, None].expand_as(x)


@pytest.mark.parametrize(
    ("where", "of", "says"),
    [
        (heads(1, 2), cases(heads=3, kv_heads=3), "all but the first."),
        (heads(1, 4), cases((3, 4), heads=6, kv_heads=2), "those whose h mod G is not h // (H/G)."),
    ],
)
def test_the_heads_with_random_errors(where, of, says):
    sentences = told(planted(noise("out", where=where), of))
    assert sentences[0].startswith(f"In out the wrong heads are {says} Look at how heads"), text(sentences)
    assert not any("heads" in sentence for sentence in told(planted(noise("out", where=heads(0)), of)))
    with_one_head = planted(noise("out", where=where), of) + planted(noise("out"), cases(heads=1, kv_heads=1))
    assert told(with_one_head)[0] == sentences[0]


@pytest.mark.parametrize(("wrong", "told_of"), [((1, 2), True), ((1,), False), ((0, 1, 2), False)])
def test_all_sequences_but_the_first(wrong, told_of):
    """An answer of one sequence that is wrong refutes it."""
    where = noise("out", where=lambda case, x: torch.isin(torch.arange(3), torch.tensor(wrong)).view(3, 1, 1, 1))
    answers = planted(where, cases(batch=3))
    said = "In out the wrong sequences of the batch are all but the first. Look at what is taken from the first"
    assert any(sentence.startswith(said) for sentence in told(answers)) == told_of
    assert not any("sequences" in sentence for sentence in told(answers + planted(noise("out"))))


def test_one_rank_alone_that_is_wrong_is_told_first():
    answers = planted(times(lambda P: 2, "dv"), cases((1, 2, 3)))
    first, second, *_ = infer(Examination(PATIENT, answers), NO_XRAY)
    assert first.says == "One rank alone is wrong already (dv), so no message between ranks is to blame"
    assert first.brief.endswith(second.says)
    assert not any("One rank alone" in sentence for sentence in told(planted(times(lambda P: P, "dv"), cases((1, 2)))))


def test_a_right_ring_gets_no_sentence():
    answers = planted(lambda case, x: {})
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
        times(lambda P: P, "dq"),
        chunkwise(lambda x: x.roll(1, dims=2), "dq"),
        only("dq", lambda x: x.bfloat16().double()),
        noise("dq", where=heads(1)),
        lambda case, x: {"dq": x["dk"]},
    ],
)
def test_a_pattern_of_some_answers_is_not_told_as_general(change):
    everywhere = told(planted(change))
    assert len(everywhere) == 2, text(everywhere)
    for P in (2, 3, 4):
        mixed = planted(lambda case, x, P=P: (noise("dq") if case.world_size == P else change)(case, x))
        assert told(mixed) == [str(of_gradients(["dq"]))], text(told(mixed))


def test_an_answer_that_cannot_show_a_pattern_does_not_refute_it():
    answers = planted(from_rank(lambda r, P: r + 1, "dk")) + planted(noise("dk"), [Case(3, 19)])  # unequal chunks
    assert any("rank r has the right numbers of rank r + 1" in sentence for sentence in told(answers))


def test_two_ranks_do_not_tell_p_from_2():
    twice = times(lambda P: 2, "dq")
    assert "P or 1/scale or 2 times" in told(planted(twice, cases((2,))))[0]
    assert "1/scale or 2 times" in told(planted(twice, cases((2,)) + cases((3,))))[0]
    assert "P or" not in told(planted(twice, cases((2,)) + cases((3,))))[0]


def test_numbers_of_patterns_do_not_count_where_they_are_right():
    """dv is wrong with 3 ranks only. What is told of dv is true where dv is wrong."""

    def change(case, x):
        return {"dq": 2 * x["dq"]} | ({"dv": 0 * x["dv"]} if case.world_size == 3 else {})

    sentences = told(planted(change))
    assert any(sentence.startswith("In dv all numbers are 0 times") for sentence in sentences)
    assert str(of_gradients(["dq", "dv"])) in sentences


def home(kept):
    return replace(RIGHT, home=lambda part: part.block if kept(part) else None)


P3 = Case(3, 12)


MASK = "the mask of these tiles"
TWO_BLOCKS_ON = "round 2 on every rank: what belongs to KV(j + 1); round 1 on every rank: what belongs to KV(j + 2)"


@pytest.mark.parametrize(
    ("name", "says", "look"),
    [
        ("last_block_skipped", "round 2 on every rank: missing", "the number of rounds, and at what"),
        ("own_queries_only", "rounds 1, 2 on every rank: missing", "the number of rounds"),
        ("gradients_travel_other_way", TWO_BLOCKS_ON, "the hops"),
        ("lse_of_the_block", "all tiles: scaled, each query by its own factor: by 1.88 to 6.46", "the lse that the"),
        ("own_block_twice", "round 0 on every rank: counted twice", "the number of rounds, and at the start"),
        ("diagonal_hidden", "round 0 on every rank: a triangle without its diagonal instead of a triangle", MASK),
        (
            "key_lost_at_a_border",
            "rounds 1, 2 on every rank: 4 pairs too few",
            "what hides keys though no mask was asked",
        ),
        ("one rank of 3", "round 1 on rank 2; round 2 on rank 2: missing", "the number of rounds"),
        ("one rank of 4", "3 tiles: missing", "the number of rounds"),
    ],
)
def test_what_an_xray_shows_is_told_with_where_to_look(name, says, look):
    steps = home(lambda part: part.rank < part.world_size - 1 or part.rank == part.block)
    steps = steps if name not in CATALOGUE else CATALOGUE[name].variants[0](RIGHT)
    case = Case(4, 16) if name == "one rank of 4" else replace(P3, causal=name == "diagonal_hidden")
    sentences = told(planted(noise(*EVERYTHING)), on_paper(case, steps))
    assert sentences[0].startswith(f"X-ray (P = {case.world_size}, ")
    assert f"): {says}. Look at {look}" in sentences[0]
    assert sum("X-ray" in sentence for sentence in sentences) == 1


def test_where_to_look_for_hidden_pairs_and_for_keys_that_count_several_times():
    lost = on_paper(Case(3, 12, documents=(5, 7)), CATALOGUE["documents_end_with_the_chunk"].variants[0](RIGHT))
    assert "Look at where documents and windows begin" in str(lost.facts()[0])
    key_0 = (torch.arange(12) == 0)[:, None]
    for change, look in (
        (lambda case, x: {"dk": x["dk"] * (1 + 2 * key_0), "dv": x["dv"] * (1 + 2 * key_0)}, "Look at the way home"),
        (lambda case, x: {"out": compute(case, whole=thrice(case))["out"]}, "Look at v of these keys"),
    ):
        first, second = (compute(run) for run in cases_of_xray(P3))
        runs = [x | change(run, x) for run, x in zip(cases_of_xray(P3), (first, second), strict=True)]
        assert any(look in str(fact) for fact in xray_of(*runs, P3).facts()), look


def thrice(case):
    """The inputs with a v of key 0 that is 3 times too large."""
    q, k, v, d_out = case.whole()
    return q, k, torch.cat([3 * v[:, :, :1], v[:, :, 1:]], dim=2), d_out


def test_each_matrix_of_the_backward_pass_that_is_wrong_in_its_own_way_is_told():
    steps = replace(home(lambda part: part.round > 0), add_q=lambda case, total, part: part)
    shown = [str(fact).partition("): ")[2] for fact in on_paper(P3, steps).facts()]
    assert [matrix.partition(",")[0] for matrix in shown] == ["W backward", "dS in dQ"]
    [forward] = on_paper(P3, CATALOGUE["averages_added"].variants[0](steps)).facts()
    assert "): W forward, " in forward.says
    without = [str(fact).partition("): ")[2] for fact in on_paper(P3, steps).facts(known={"dv", "dq"})]
    assert without == [sentence.partition(" Look")[0] for sentence in shown]


def test_answers_that_change_or_were_never_claimed_prove_nothing():
    answers = planted(times(lambda P: 2, "dq"))
    changing = [replace(answer, changes=True) for answer in planted(noise("dq"))]
    assert told(answers + changing) == told(answers)
    assert told(changing) == []
    unequal = planted(noise(*EVERYTHING), [Case(3, 19)])
    unequal = [replace(answer, question=replace(answer.question, feature=UNEQUAL), raised=True) for answer in unequal]
    found = Examination(PATIENT, answers + unequal)
    assert list(map(str, infer(found, NO_XRAY))) == told(
        answers + [a for a in unequal if a.question.feature not in found.beyond]
    )


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
    """What is told of ranks that wait in these lines of code."""
    Path("ring.py").write_text("\n".join(lines.values()) + "\n")
    linecache.clearcache()
    waits = {("ring.py", i + 1, "attention"): list(map(int, ranks.split(", "))) for i, ranks in enumerate(lines)}
    return str(inferred(Answer(Question(Case(P, 6 * P)), FAILED, silent=tuple(late), waits=waits)) or "")


@pytest.mark.parametrize(
    ("lines", "late", "says"),
    [
        ({"0, 1, 2": "    dist.send(k, right)"}, [0, 1, 2], "Every rank waits in a send, and no rank receives"),
        ({"0, 1, 2": "    dist.recv(k, left)"}, [0, 1, 2], "Every rank waits in a receive"),
        ({"1": "    dist.recv(k, left)"}, [1], "Ranks 0, 2 returned, and rank 1 waits for a message that no"),
        ({"1, 2": "    dist.send(k, right)"}, [1, 2], "Rank 0 returned, and ranks 1, 2 wait for a rank to receive its"),
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
    factor = 1.25 if inputs == "large" else 1 + 16 * torch.finfo(torch.bfloat16).eps
    return planted(times(lambda P: factor, wrong), [Case(4, 32, inputs=inputs, dtype=torch.bfloat16)])[0]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([imprecise("normal", "dq")], ["dq is rounded to 16 bits too often. Look at the dtype of the sum of dQ"]),
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

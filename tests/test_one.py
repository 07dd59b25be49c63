"""`make one C=NAME` finds the tests and the chapter of every concept, and tells which part failed."""

import pytest

from tests import one

CONCEPTS = one.concepts()


@pytest.mark.parametrize("name", CONCEPTS)
def test_every_part_of_a_concept_is_found(name):
    concept = CONCEPTS[name]
    parts = set(one.commands(concept))
    # test_processes, test_schedules, test_models_train, test_models_hugging_face and test_cost_model test these
    without_tests = {"ranks"}
    without_tests |= {"linear_attention"}  # test_state_ring
    without_tests |= {"all_gather", "all_to_all", "hybrid", "layouts", "partition"}
    without_tests |= {
        "naive_attention",
        "grouped_query",
        "jax_ring",
    }  # test_blockwise_attention, test_backward, test_jax
    expected = {"lint", "script"} if name in without_tests else {"lint", "script", "tests"}
    assert parts == expected | {"notebook"}


def test_the_chapter_is_the_one_of_the_map():
    chapters = {name: one.chapter(concept) for name, concept in CONCEPTS.items()}
    assert chapters["naive_attention"] == chapters["online_softmax"] == "01_attention_to_online_softmax"
    assert chapters["causal"] == "07_causal_balance"
    assert chapters["transformer"] == "10_a_model_in_the_ring"
    assert chapters["documents"] == "13_documents_and_windows"
    assert chapters["generate"] == "14_generation"
    assert chapters["train"] == chapters["mesh"] == "11_meshes"
    assert one.chapter(one.ROOT / "ringlab/basics/unknown.py") is None


@pytest.mark.parametrize("words", [["causal"], ["ringlab/training/causal.py"], ["ringlab.training.causal"]], ids=str)
@pytest.mark.parametrize("broken", [None, "lint", "tests", "script", "notebook"])
def test_a_part_that_fails_is_named(monkeypatch, capsys, words, broken):
    parts = one.commands(CONCEPTS["causal"])
    monkeypatch.setattr(one, "run", lambda steps: (int(broken is not None and steps == parts[broken]), "words", 1.0))
    assert one.main(words) == (1 if broken else 0)
    assert capsys.readouterr().out.endswith(f"causal: FAILED: {broken}\n" if broken else "causal: all ok\n")


def test_the_commands_of_a_part_run_until_one_fails():
    status, printed, _ = one.run([["echo", "one"], ["sh", "-c", "echo two >&2; exit 3"], ["echo", "three"]])
    assert (status, printed) == (3, "one\ntwo\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [(["casual"], "Did you mean C=causal? Choose"), ([], "C= is no concept. Choose"), (["?"], "train")],
)
def test_an_unknown_concept_is_answered_with_the_known_ones(capsys, words, said):
    assert one.main(words) == 2
    assert said in capsys.readouterr().err

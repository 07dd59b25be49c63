"""The numbers of the site's explorers, without the site: what book/test_explorers.py asks of built pages."""

import json
from unittest import mock

import pytest

from book import data
from book import test_explorers as explorers
from ring_doctor.catalogue import CATALOGUE
from ring_planner import command
from ring_planner.plan import digits
from ring_planner.presets import GPUS

pytestmark = pytest.mark.slow
test_rounds, test_mistakes = (
    explorers.test_the_running_result_is_attention_to_the_blocks_so_far,
    explorers.test_a_mistake_is_wrong_where_it_must_be,
)


@pytest.fixture(scope="module")
def numbers():
    """Of a few rings, as the pages load them."""
    with mock.patch.object(data, "MASKS", ("none", "causal", "causal documents window")):
        return {f"ring-{P}-8": json.loads(json.dumps(data.ring_file(P, 8))) for P in (1, 3, 4)}


def test_a_ring_ends_with_full_attention_or_says_why_not(numbers):
    for P in (3, 4):
        explorers.assert_full_attention(P, 8, numbers[f"ring-{P}-8"])
    three, four = numbers["ring-3-8"], numbers["ring-4-8"]
    said = "8 tokens in the {} layout on 3 ranks; expected a multiple of {}"
    refused = {name: {"refused": said.format(name, n)} for name, n in {"zigzag": 6, "striped": 3}.items()}
    assert three["layouts"] == {"contiguous": {"positions": [[0, 1, 2], [3, 4, 5], [6, 7]]}, **refused}
    assert four["layouts"]["zigzag"]["positions"] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert (four["documents"], four["window"], four["bytes"]) == ([3, 5], 3, 2 * 2 * 4)
    times = four["cases"]["contiguous, none"]["time"]  # 4 pairs a round, and 3 hops of 2 or of 8
    assert {name: (its["end"], its["idle"]) for name, its in times.items()} == {
        "fast": (16, [0] * 4),
        "slow": (28, [0.4286] * 4),
    }
    assert len(times["slow"]["events"]) == 4 * (4 + 3 + 3)  # and waits for each hop


@pytest.mark.parametrize("model", ["deepseek-v3.2", "llama-3.1-405b"])
def test_the_planners_page_has_what_its_command_prints(monkeypatch, capsys, model):
    """Of a GPU with a second name. deepseek-v3.2 chooses its keys; the other one fits on no host."""
    for name, few in {"GPUS": dict.fromkeys(("h100", "second"), GPUS["h100"]), "HOSTS": (1, 8)}.items():
        monkeypatch.setattr(data, name, few)
    its = data.planned(model)
    assert data.planner()["gpus"] == [*its["answers"]] == [*its["thresholds"]] == ["h100"]
    assert its["indexer"] == (2048 if "3.2" in model else None)
    for hosts, answers in zip(data.HOSTS, its["answers"]["h100"], strict=True):
        for seq_len, found in zip(data.LENGTHS, answers, strict=True):
            words = f"--model {model} --gpu h100 --hosts {hosts} --seq-len {seq_len}"
            assert (command.main(words.split()) == 0) == (found is not None)
            said = capsys.readouterr().out
            if found:
                explorers.assert_as_printed(found, said)
                low, high, _ = found["interval"] or (0, 0, 0)
                assert (f"{digits(low)} to {digits(high)} s" in said) == (found["interval"] is not None)
    if model == "llama-3.1-405b":  # 128 heads on 8: a hop is 6/5 of 2 · 8/128 of the FLOP/s over the bytes/s
        flops, gpu = GPUS["h100"].rates(GPUS["h100"].kernel, 128)[1], GPUS["h100"]
        chunks = [0.15 * flops / rate for rate in (gpu.bandwidth, gpu.host_bandwidth)]
        assert [*its["thresholds"]["h100"].values()] == pytest.approx(chunks)


def test_a_report_of_the_page_is_of_its_mistake():
    for name, report in data.xrays():
        assert (report["verdict"], report["mistakes"]) == (f"SICK: {name}", [[name]])
        assert report["remarks"] == [CATALOGUE[name].what, f"Where to look: {CATALOGUE[name].look}."]
        assert any(label not in ("ok", "-") for grid in report["grids"] for row in grid["tiles"] for label in row)


def test_a_book_with_one_broken_language_is_broken(monkeypatch, tmp_path):
    book = pytest.importorskip("book.__main__", reason="needs Sphinx: make site")

    def sphinx(builder, language, at):
        at.mkdir(parents=True)
        return int(language != "en")

    fakes = {"sphinx": sphinx, "write": lambda at: (at / "narrow").mkdir(parents=True), "REPOSITORY": "there"}
    for name, fake in {**fakes, "ROOT": tmp_path}.items():
        monkeypatch.setattr(book, name, fake)
    assert book.build() == 1

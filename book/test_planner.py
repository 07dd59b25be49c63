"""The planner's page says what `ring-plan` says."""

import contextlib
import io

import pytest

from bench.scoreboard import grades
from book.data import HOSTS, LENGTHS, answer, thresholds
from book.test_explorers import READY, rows
from ringlab.planning import cost_model
from ringlab.planning.plan import digits
from ringlab.planning.presets import GPUS, MODELS

CHOICES = [("llama-3.1-8b", "h100", 1, 131072), ("qwen2.5-7b", "l40s", 2, 32768), ("llama-3.1-405b", "h200", 2, 131072)]


def printed(command):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert cost_model.main(command.split()[1:]) == 0
    return text.getvalue()


@pytest.mark.parametrize(("model", "gpu", "hosts", "seq_len"), CHOICES)
def test_the_answers_are_those_of_the_command(model, gpu, hosts, seq_len):
    found = answer(MODELS[model], GPUS[gpu], hosts, seq_len)
    said = printed(f"ring-plan --model {model} --gpu {gpu} --hosts {hosts} --seq-len {seq_len}")
    if found is None:
        assert "does not fit" in said
    else:
        first = said.split("GiB  way\n")[1].splitlines()[0].split(maxsplit=3)
        assert first == [*(digits(found[name]) for name in ("speed", "seconds", "gib")), found["way"]]
    assert thresholds(MODELS["llama-3.1-8b"], GPUS["h100"])["between"] > 1e3


def test_the_page_says_what_its_command_prints(watched):
    page = watched.open("planner.html", READY)
    for model, gpu, hosts, seq_len in CHOICES:
        for name, value in (("model", model), ("gpu", gpu), ("hosts", hosts), ("seq_len", seq_len)):
            page.select_option(f"[name={name}]", str(value))
        said = printed(page.inner_text("#planner-command"))
        assert len(rows(page, "ways")) == len(HOSTS) * len(LENGTHS)
        if "does not fit" in said:
            assert page.inner_text("#planner-status").startswith("Advice: nothing fits.")
        else:
            way = said.split("GiB  way\n")[1].splitlines()[0].split(maxsplit=3)[3]
            assert page.inner_text("#planner-status").startswith(f"Advice: {way}: ")
    page = watched.open(page.url.removeprefix(f"{watched.address}/"), READY)
    assert page.input_value("[name=model]") == CHOICES[-1][0]  # kept in the address


def test_the_scoreboard_shows_every_prediction(watched):
    page = watched.open("planner.html", READY)
    marked = grades()
    cells = [text.split("\t") for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
    of_grades = [
        [" ".join(each.name.split()), digits(each.measured), digits(each.predicted), f"{100 * each.error:+.1f}"]
        for each in marked
    ]
    assert [[row[0].strip(), *(x.split()[0] for x in row[2:4]), row[4].strip()] for row in cells] == of_grades
    page.select_option("#scoreboard-form [name=way]", "hybrid")
    hybrids = sum(each.section == "attention" and each.row["way"] == "hybrid" for each in marked)
    assert page.locator("#scoreboard-table tbody tr:visible").count() == hybrids
    page.select_option("#scoreboard-form [name=way]", "")
    page.locator("#scoreboard-table th button").nth(4).focus()
    page.keyboard.press("Enter")
    assert page.locator("#scoreboard-table th").nth(4).get_attribute("aria-sort") == "ascending"
    errors = [float(text.split("\t")[4]) for text in page.locator("#scoreboard-table tbody tr").all_inner_texts()]
    assert errors == sorted(errors)

"""The appendix of errata shows what its command prints, and its other numbers follow from the tables as printed."""

import re
from pathlib import Path

from ringlab.planning import cost_model
from ringlab.planning.hidden_communication import LLAMA_7B, TABLE_2
from ringlab.planning.ring_memory import TABLE_1, TABLE_3, largest_activations, longest_context
from tests.shown import check_shown

TEXT = (Path(__file__).parent.parent / "notebooks/appendix_errata.md").read_text()
SLIPS = re.findall(r"^\| ((?:table|section|appendix|algorithm).*?) \| (.*?) \| (.*?) \| (.*?) \|$", TEXT, re.M)


def slip(where):
    """What was printed, what is right, and why, of the slip in this place."""
    return next(rest for found, *rest in SLIPS if found.startswith(where))


def test_it_shows_what_the_command_prints(capsys):
    command, shown = re.search(r"```console\n\$ (.*?)\n(.*?)```", TEXT, re.S).groups()
    assert command == "python -m ringlab.planning.cost_model"
    assert cost_model.main([]) == 0
    check_shown(shown, capsys.readouterr().out)


def test_the_slips_of_table_2():
    _, flops, bandwidth, chunk, sequence = next(row for row in TABLE_2 if row[0] == "A100 InfiniBand")
    printed, right, why = slip("table 2")
    assert printed == f"{chunk}K"
    assert right == f"{flops / bandwidth / 1000:.2f}K"
    assert f"{sequence}K, is six times {sequence / 6:.2f}K and not" in why


def test_the_slips_of_table_1():
    printed, right, _ = slip("table 1, vanilla")
    assert (printed, right) == (TABLE_1["vanilla"][2], TABLE_1["vanilla"][0])
    printed, right, _ = slip("table 1, ring")
    h, c = LLAMA_7B.hidden, 1000
    assert printed == TABLE_1["ring"][0]
    assert right == f"{largest_activations('ring', LLAMA_7B, 8 * c, c)[0] // (h * c)}bch"


def test_the_other_slips():
    assert slip("appendix A, 512 devices")[1] == f"a ring of {512 // 8}"
    assert slip("sections 1 and 2")[1] == f"{100e6 * 1024 * 2 / 1e9:.0f} GB a layer"
    assert round(1000e9 / (100e6 * 1024 * 2)) == 5
    assert len(SLIPS) == 7


def test_what_is_said_of_table_3():
    gains = [(devices, gain) for devices, *_, gain in TABLE_3]
    assert sum(devices == gain for devices, gain in gains) == 8
    assert sum(devices == 2 * gain for devices, gain in gains) == 2
    assert all(length.bit_count() == 1 for *_, blockwise, ring, _ in TABLE_3 for length in (blockwise, ring))
    assert [alone for _, hardware, model, alone, _, _ in TABLE_3 if model == "7B" and "A100" in hardware] == [32, 128]
    on_8, on_32 = (longest_context(80e9, LLAMA_7B, 32, P) / P for P in (8, 32))
    assert f"that gives {on_32 / on_8:.2f} times the tokens" in TEXT
    assert f"should be {(32 + 1) / (32 + 6):.2f} of the number" in TEXT

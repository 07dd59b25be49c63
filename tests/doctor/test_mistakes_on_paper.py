"""On paper a right ring is full attention, each entry of the catalogue computes what its sentence says, none twice.

Each entry gives the numbers of mistakes.json, as when it stood beside a second definition;
`python -m tests.doctor.test_mistakes_on_paper` writes it.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ring_doctor.asking.case import Case
from ring_doctor.catalogue import CATALOGUE
from ring_doctor.mistakes import PAGE, told, words
from ring_doctor.mistakes import backward as mistakes_of_backward
from ring_doctor.mistakes import states as mistakes_of_states
from ring_doctor.mistakes.paper_ring import RIGHT, NotOnPaper, compute
from ringlab.ring.layouts import LAYOUTS
from tests.doctor.examined import by_autograd

ROOT, OF_MODELS = PAGE.parents[2], PAGE.parents[1] / "whole_models" / PAGE.name
MASKS = [(False, "contiguous"), *((True, layout) for layout in LAYOUTS)]


@given(
    st.integers(1, 5),
    st.sampled_from(MASKS),
    st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    st.sampled_from(["nothing", "documents", "window", "sinks"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_right_ring_on_paper_is_full_attention(world_size, mask, heads, more, autograd, seed):
    case = Case(world_size, 6 * world_size, *mask, heads=heads[0], kv_heads=heads[1], seed=seed)
    if more == "documents":
        case = replace(case, documents=(2, case.seq_len - 2))
    elif more == "window" and case.causal:
        case = replace(case, window=1 + seed % case.seq_len)
    elif more == "sinks":
        case = replace(case, sinks=True, kv_heads=case.heads)
    results = by_autograd(case, RIGHT) if autograd else compute(case)
    for name, right in case.right().items():
        assert name == "dsinks" or right.accepts(results[name]), name  # which is not computed on paper


def test_every_entry_of_the_page_says_what_where_and_which_chapter():
    for page in (PAGE, OF_MODELS):
        text = page.read_text()
        entries = [entry for section in re.findall(r"^## (.+)$", text, re.M) for entry in words(section, page).values()]
        assert [entry.name for entry in entries] == re.findall(r"^#{3} *(.+)$", text, re.M)
        assert page == OF_MODELS or len({entry.what for entry in entries}) == len(entries)
        for entry in entries:
            assert entry.what[0].isupper() or entry.what.startswith(("dQ", "dK", "δ"))
            assert (entry.what[-1], entry.look[-1] == ".") == (".", False)
            chapters = list(ROOT.glob(f"notebooks/{entry.chapter:02}_*.ipynb"))
            assert len(chapters) == 1 or entry.name in mistakes_of_states.MISTAKES
    assert CATALOGUE["sums_in_16_bits"].wild[1:] == ("ring-flash-attention #67",)


def test_a_name_without_its_words_or_without_a_change_is_an_error():
    table = mistakes_of_backward.CHANGES
    with pytest.raises(ValueError, match=r"new, newer given once; expected words in README\.md, ## Backward"):
        told("Backward", {"newer": [], **table, "new": []})
    with pytest.raises(ValueError, match="delta_missing given once; expected words"):
        told("Backward", {name: changes for name, changes in table.items() if name != "delta_missing"})


# Each entry has the numbers that it had when it stood beside a second definition ------------------------------------


RECORDED = Path(__file__).with_name("mistakes.json")
CAUSAL = Case(4, 24, True, heads=4)
ASKED = [  # unequal in all that an entry may confuse
    Case(4, 24, heads=4, dtype=torch.bfloat16),
    Case(3, 18, True, "zigzag", heads=6, kv_heads=3, scale=0.3, batch=2, dtype=torch.float16),
    Case(3, 19, True, heads=8, kv_heads=8, sinks=True, head_dim=8),
    Case(3, 18, True, "striped", heads=6, value_dim=6),
    replace(CAUSAL, window=3),
    replace(CAUSAL, layout="zigzag", window=5),
    replace(CAUSAL, window=8, window_right=6),
    replace(CAUSAL, window=6, documents=(7, 17)),
    replace(CAUSAL, layout="striped", documents=(7, 17)),
    replace(CAUSAL, inputs="large"),
    Case(1, 450, heads=1, kv_heads=1, head_dim=1),  # tiles of 64, 128 and 256 tokens, and a rest of each
]


def number_of(case, change):
    """All results in one number: their sum, with other weights for each. None where the mistake cannot be computed."""
    try:
        results = compute(case, change(RIGHT))
    except (NotOnPaper, RuntimeError):  # shapes that do not fit
        return None
    flat = torch.cat([results[name].double().flatten() for name in sorted(results)]).nan_to_num(1e3, 2e3, -2e3)
    return round((flat * torch.arange(1.0, len(flat) + 1).sqrt().cos()).sum().item(), 9)


def numbers_of(name):
    return [[number_of(case, change) for case in ASKED] for change in CATALOGUE[name].variants]


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_an_entry_has_the_numbers_that_were_recorded(name):
    found, recorded = numbers_of(name), json.loads(RECORDED.read_text())[name]
    assert [[x is None for x in row] for row in found] == [[x is None for x in row] for row in recorded]
    for row, known in zip(found, recorded, strict=True):
        assert [x for x in row if x is not None] == pytest.approx([x for x in known if x is not None], 1e-7, 1e-7)


def test_every_row_has_its_entry_and_no_two_entries_are_one():
    recorded = json.loads(RECORDED.read_text()) | {"right": [[number_of(case, lambda steps: steps) for case in ASKED]]}
    assert {*recorded} == {*CATALOGUE, "right"}
    names = {tuple(row): name for name, rows in recorded.items() for row in rows}
    assert all(names[tuple(row)] == name for name, rows in recorded.items() for row in rows)


if __name__ == "__main__":
    rows = [f'"{name}": {json.dumps(numbers_of(name))}' for name in sorted(CATALOGUE)]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")

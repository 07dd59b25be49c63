"""The numbers that the explorers show are those of full attention, of its gradients and of what ranks can wait for."""

import math

import pytest
import torch

from bench import scoreboard
from book import data
from ringlab.support.rounding import exact_attention
from ringlab.training.layouts import LAYOUTS, check_layout

HALF = 0.5e-4 + 1e-9  # the numbers have four digits after the point


def dealt_out(P, S, layout):
    try:
        check_layout(layout, S, P)
    except ValueError:
        return False
    return True


def sees(name, S):
    """Which keys a query sees, in words: (S, S)."""
    query, key = torch.arange(S)[:, None], torch.arange(S)
    seen = torch.ones(S, S, dtype=torch.bool)
    first = 3 * S // 8
    if "causal" in name:
        seen &= key <= query
    if "documents" in name:
        seen &= (key < first) == (query < first)
    if "window" in name:
        seen &= key > query - (S // 4 + 1)
    return seen


@pytest.mark.parametrize("P", data.RANKS)
def test_every_ring_ends_with_full_attention_and_its_gradients(P):
    for S in data.seq_lens(P):
        x, shown = data.tokens(S), data.ring_file(P, S)
        for layout in LAYOUTS:
            assert ("refused" in shown["layouts"][layout]) == (not dealt_out(P, S, layout))
        for name, one in shown["cases"].items():
            _, mask = name.split(", ")
            visible = sees(mask, S)
            leaves = [x.clone().requires_grad_() for _ in range(3)]
            q, k, v = leaves
            weights = (q @ k.mT / math.sqrt(2)).masked_fill(~visible, -math.inf).softmax(dim=-1)
            out = weights @ v
            right = [out.detach(), *torch.autograd.grad(out, leaves, x)]
            rows = torch.cat([torch.tensor(one["out"]), torch.tensor(one["backward"][-1])], dim=-1)
            assert (rows - torch.cat([each[0, 0] for each in right], dim=-1)).abs().max() <= HALF, name
            *_, last = one["states"]
            assert torch.tensor([row[4:] for row in last]).sub(out[0, 0]).abs().max() <= HALF
            assert sum(map(sum, one["pairs"])) == visible.sum()
            assert len(one["pairs"]) == len(one["states"]) == one["hops"] + 1 <= P


def test_the_running_result_is_attention_to_the_blocks_so_far():
    one, x = data.ring(4, 8, "contiguous", data.MASKS["none"](8)), data.tokens(8)
    for t, rows in enumerate(one["states"]):
        for token, (m, l, *o, a, b) in enumerate(rows):
            blocks = [(token // 2 - i) % 4 for i in range(t + 1)]
            keys = x[:, :, [2 * j + i for j in blocks for i in (0, 1)]]
            right = exact_attention(x[:, :, token : token + 1], keys, keys)["out"].exact[0, 0, 0]
            scores = (x[0, 0, token] @ keys[0, 0].T) / math.sqrt(2)
            assert m == pytest.approx(scores.max().item(), abs=HALF)
            assert l == pytest.approx((scores - scores.max()).exp().sum().item(), abs=HALF)
            assert [a, b] == pytest.approx(right.tolist(), abs=HALF)
            assert o == pytest.approx([a * l, b * l], abs=4 * l * HALF + HALF)


WRONG_ROWS = [  # mask, mistake, and the tokens whose rows it makes wrong
    ("none", "averages_added", range(8)),  # every row adds up P averages
    ("none", "last_block_skipped", range(8)),
    ("causal", "causal_per_block", range(7)),  # the second token of a chunk sees all of every block; token 7 may
    ("causal", "last_block_skipped", range(6, 8)),  # only the last rank sees a block P - 1 places before its own
]


@pytest.mark.parametrize(("mask", "name", "where"), WRONG_ROWS)
def test_a_mistake_is_wrong_where_it_must_be(mask, name, where):
    one = data.ring(4, 8, "contiguous", data.MASKS[mask](8))
    right, wrong = torch.tensor(one["out"]), torch.tensor(one["wrong"][name]["rows"])
    assert (right - wrong).abs().amax(dim=-1).gt(2 * HALF).nonzero().flatten().tolist() == list(where)
    assert one["wrong"][name]["tokens"] == len(where)
    assert one["wrong"][name]["off"] == pytest.approx((right - wrong).abs().max().item(), abs=2 * HALF)


def test_the_keys_of_hop_0_make_the_gradients_wrong_and_one_rank_does_not_show_it():
    one = data.ring(4, 8, "contiguous", data.MASKS["none"](8))
    assert one["wrong"]["keys_of_hop_0"]["tokens"] == 8
    assert data.ring(1, 8, "contiguous", data.MASKS["none"](8))["wrong"]["keys_of_hop_0"]["tokens"] == 0


def test_idle_time_is_that_of_the_slowest_rank():
    one = data.ring(4, 16, "contiguous", data.MASKS["causal"](16))
    even = data.ring(4, 16, "zigzag", data.MASKS["causal"](16))
    for ring in (one, even):
        for of_speed in ring["time"].values():
            for r, idle in enumerate(of_speed["idle"]):
                assert idle == pytest.approx(1 - sum(row[r] for row in ring["pairs"]) / of_speed["end"], abs=HALF)
    assert min(even["time"]["fast"]["idle"]) < min(one["time"]["fast"]["idle"][:-1])


def test_the_scoreboard_is_the_one_that_the_command_prints(capsys):
    assert scoreboard.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    board = data.scoreboard()
    for row in board["rows"]:
        both = " ".join(f"{x:.4g}" if x < 1e4 else f"{x:,.0f}" for x in (row["measured"], row["predicted"]))
        numbers = f"{both} {row['unit'].replace('µs', 'us')}"
        assert f"{row['case']} {numbers} {100 * row['error']:+.1f} %" in printed
    assert f"{board['right']} of {board['questions']} right" in printed
    assert (
        " ".join(["all times", str(board["times"]), *(f"{100 * x:.1f}" for x in board["errors"].values())]) in printed
    )

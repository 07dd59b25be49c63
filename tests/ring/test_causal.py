"""The layouts of a causal ring: which tokens a rank holds, what it computes, how long it idles, and wrong slices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab.ring.causal import idle_share, visible_pairs, visible_slice
from ringlab.ring.layouts import LAYOUTS, positions, rotary, shard, unshard
from tests.attention import random_qkv

worlds = st.integers(1, 8)
layouts = st.sampled_from(LAYOUTS)


@st.composite
def sequences(draw):
    """(layout, seq_len, world_size) that fit together."""
    layout, world_size = draw(layouts), draw(worlds)
    if layout == "contiguous":
        return layout, draw(st.integers(world_size, 5 * world_size)), world_size
    return layout, draw(st.integers(1, 4)) * 2 * world_size, world_size


@settings(deadline=None, derandomize=True)
@given(sequences())
def test_every_token_is_on_one_rank_and_a_rank_holds_them_in_order(sequence):
    layout, seq_len, world_size = sequence
    at = [positions(layout, seq_len, rank, world_size) for rank in range(world_size)]
    assert sorted(torch.cat(at).tolist()) == list(range(seq_len))
    for mine in at:
        assert mine.dtype == torch.int64
        assert mine.tolist() == sorted(mine.tolist())
    x = torch.randn(2, 3, seq_len, 4)
    assert torch.equal(unshard([shard(x, layout, rank, world_size) for rank in range(world_size)], layout), x)


def test_positions_of_sixteen_tokens_on_four_ranks():
    assert positions("contiguous", 16, 1, 4).tolist() == [4, 5, 6, 7]
    assert positions("zigzag", 16, 1, 4).tolist() == [2, 3, 12, 13]
    assert positions("striped", 16, 1, 4).tolist() == [1, 5, 9, 13]
    assert positions("contiguous", 7, 3, 4).tolist() == [6]


@settings(deadline=None, derandomize=True)
@given(sequences())
def test_a_slice_is_exactly_what_the_mask_leaves(sequence):
    """Slices and triangles leave what the definition leaves: key position <= query position."""
    layout, seq_len, world_size = sequence
    at = [positions(layout, seq_len, rank, world_size) for rank in range(world_size)]
    pairs = visible_pairs(layout, seq_len, world_size)
    for rank in range(world_size):
        for block in range(world_size):
            visible = at[block] <= at[rank][:, None]
            computed = torch.zeros_like(visible)
            part = visible_slice(layout, rank, block, len(at[rank]))
            if part is not None:
                queries, keys, triangle = part
                square = computed[queries, keys]
                assert not triangle or square.shape[0] == square.shape[1]  # kernels align others elsewhere
                square |= torch.ones_like(square).tril() if triangle else True
            assert torch.equal(computed, visible), (layout, rank, block)
            assert pairs[(rank - block) % world_size, rank] == visible.sum()
    assert pairs.sum() == seq_len * (seq_len + 1) // 2


def rotary_by_hand(x, position, base=10_000.0):
    """Equation 34 of Su et al. 2021, number by number: pair i of D/2 is turned by position · base^(-2i/D)."""
    out, D = torch.empty_like(x, dtype=torch.float64), x.shape[3]
    for c, m in enumerate(position.tolist()):
        for i in range(D // 2):
            cos, sin = math.cos(m * base ** (-2 * i / D)), math.sin(m * base ** (-2 * i / D))
            first, second = x[..., c, 2 * i].double(), x[..., c, 2 * i + 1].double()
            out[..., c, 2 * i] = first * cos - second * sin
            out[..., c, 2 * i + 1] = second * cos + first * sin
    return out


FAR = torch.tensor([0, 1, 2, 100, 255, 256, 257, 4096, 131_071])


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotary_is_equation_34(base):
    x = random_qkv((2, 2, len(FAR), 8), torch.float64)[0]
    exact = rotary_by_hand(x, FAR, base)
    torch.testing.assert_close(rotary(x, FAR, base), exact, rtol=0, atol=1e-10)  # angles up to 1e5 round to 1e-11
    if base == 10_000.0:
        assert torch.equal(rotary(x, FAR), rotary(x, FAR, base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_angles_are_not_rounded_to_the_dtype_of_x(dtype):
    """In bfloat16 position 4097 would be 4096. What is rounded: cos and sin, two products and their sum.

    Each rounds by u = eps/2 of itself, so a pair moves by (2√2 + 1) u of its length at most, which is less than 2 eps.
    """
    x = random_qkv((2, 2, len(FAR), 8), dtype)[0]
    turned, exact = rotary(x, FAR), rotary_by_hand(x, FAR)
    assert turned.dtype == dtype
    length = x.double().unflatten(-1, (-1, 2)).norm(dim=-1)  # of each pair
    error = (turned.double() - exact).unflatten(-1, (-1, 2)).norm(dim=-1)
    assert (error <= 2 * torch.finfo(dtype).eps * length).all()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (("spiral", 16, 0, 4), "expected one of contiguous, zigzag, striped"),
        (("zigzag", 12, 0, 4), r"expected a multiple of 8: pad the tokens.*pad\(x, 8\)"),
        (("striped", 15, 0, 4), r"expected a multiple of 4: pad the tokens.*pad\(x, 4\)"),
        (("contiguous", 3, 0, 4), "a token for each"),
        (("contiguous", 16, 4, 4), "expected 0 to 3"),
        (("striped", 16, -1, 4), "expected 0 to 3"),
        (("striped", 16, 0, 0), "one rank or more"),
    ],
)
def test_bad_layouts_are_refused(call, reason):
    with pytest.raises(ValueError, match=reason):
        positions(*call)


def test_idle_share_by_hand():
    assert idle_share(torch.tensor([[4, 4], [0, 4]])) == pytest.approx(0.25)
    assert math.isclose(idle_share(visible_pairs("contiguous", 8, 4)), 0.4)

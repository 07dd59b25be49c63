"""Generation over a spread cache: token for token what one process generates; what it sends; and with mistakes."""

from contextlib import contextmanager
from functools import lru_cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringlab.basics.naive_attention import naive_attention
from ringlab.models import generate as module
from ringlab.models.generate import EMPTY, SpreadCache, alone, generate, merge_over_ranks, seeded
from ringlab.models.transformer import Config, Transformer
from ringlab.ring.layouts import layout_of
from tests.attention import SEED
from tests.mistakes import as_on_hosts, assert_refused

NEW = 9
LENGTHS = (1, 17, 6)  # of the prompts: they end on different ranks
CONFIG = Config(vocab=61, layers=2, hidden=48, heads=6, kv_heads=2, feedforward=40)


def prompts_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5 + SEED)
    return [torch.randint(CONFIG.vocab, (length,), generator=generator).tolist() for length in lengths]


def windowed(q, k, v, window, **options):
    """torch's attention with the dense mask of a window."""
    S = q.shape[2]
    visible = torch.ones(S, S, dtype=torch.bool).tril().triu(1 - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def answers(context, layout="zigzag", window=None):
    """The new tokens, the positions in this rank's slots, and how many numbers this rank gave at once, each time; and
    how many rows got logits."""
    cache, rows = SpreadCache(layout, window), []
    with mock.patch.object(module, "CONFIG", CONFIG):
        model = seeded(cache).to(context.device)
    model.head.register_forward_pre_hook(lambda head, args: rows.append(args[0].shape[:-1].numel()))
    with given() as sizes:
        tokens = generate(model, cache, prompts_of(), NEW)
    assert all(x.shape[2] == cache.at.shape[1] for block in cache.blocks for x in block)
    return tokens.tolist(), cache.at.cpu(), sizes, rows


@contextmanager
def given():
    """The numbers that this rank gives to all_reduce and to of_every_rank, one entry for each call."""
    sizes = []

    def noted(function):
        def call(x, *args, **options):
            sizes.append(x.numel())
            return function(x, *args, **options)

        return call

    reduced = mock.patch.object(dist, "all_reduce", noted(dist.all_reduce))
    with reduced, mock.patch.object(module, "of_every_rank", noted(module.of_every_rank)):
        yield sizes


@lru_cache
def right_answers(window=None, lengths=LENGTHS):
    attention = partial(windowed, window=window) if window else F.scaled_dot_product_attention
    with mock.patch.object(module, "CONFIG", CONFIG):
        model = seeded(attention)
    return [alone(model, prompt, NEW) for prompt in prompts_of(lengths)]


CASES = [(1, "zigzag", None), (3, "zigzag", 4), (4, "striped", None), (8, "contiguous", 4)]


@pytest.mark.parametrize(("size", "layout", "window"), CASES)
def test_token_for_token_what_one_process_generates(ranks, size, layout, window):
    """Every token is stored once, in as few slots as hold all but the last one, and a token sends what the formula
    says. Of a prompt only the last token gets logits."""
    B, D = len(LENGTHS), CONFIG.hidden // CONFIG.heads
    tokens, slots, sizes, rows = zip(*ranks(size, answers, layout, window), strict=True)
    assert list(tokens) == [right_answers(window)] * size
    assert list(rows) == [[B] * NEW] * size
    of_a_token = [B * CONFIG.heads * (D + 2)] * CONFIG.layers
    assert list(sizes) == [[B * CONFIG.vocab, B, *[*of_a_token, B] * (NEW - 1)]] * size
    for i, length in enumerate(LENGTHS):
        stored = torch.cat([at[i] for at in slots])
        assert sorted(stored[stored < EMPTY].tolist()) == list(range(length + NEW - 1))
    room, multiple = -(-(NEW - 1) // size), max(1, layout_of(layout).multiple) * size
    assert {at.shape[1] for at in slots} == {-(-max(LENGTHS) // multiple) * multiple // size + room}
    assert min(int((at[0, -room:] < EMPTY).sum()) for at in slots) >= room - 1


def with_other_logits(context):
    """Rank 1's logits of new tokens are others, as if it rounded otherwise."""
    cache, forward = SpreadCache(), Transformer.forward

    def off(model, tokens, at, last=None):
        wrong = torch.zeros(CONFIG.vocab)
        if context.rank == 1 and cache.new is not None:
            wrong[7] = 1e6
        return forward(model, tokens, at, last) + wrong

    with mock.patch.object(module, "CONFIG", CONFIG), mock.patch.object(Transformer, "forward", off):
        return generate(seeded(cache), cache, prompts_of(), NEW).tolist()


def test_the_choice_of_rank_0_holds_on_every_rank(ranks):
    assert ranks(3, with_other_logits) == [right_answers()] * 3


CALLS = ((5,), LENGTHS), ((9,), (2, 17, 4))  # of ranks 0, 2 and 4, and of ranks 1 and 3


def one_after_the_other(context):
    """Two calls in one cache, with other prompts and another number of them, beside another part of the job."""
    groups, part = [dist.new_group(ranks) for ranks in ([0, 2, 4], [1, 3])], context.rank % 2
    cache = SpreadCache(group=groups[part])
    with mock.patch.object(module, "CONFIG", CONFIG):
        model = seeded(cache)
    return [generate(model, cache, prompts_of(lengths), NEW).tolist() for lengths in CALLS[part]]


def test_a_cache_begins_anew_with_each_call_and_knows_its_part_of_the_job(ranks):
    right = [[right_answers(None, lengths) for lengths in CALLS[rank % 2]] for rank in range(5)]
    assert ranks(5, one_after_the_other) == right


def test_each_token_of_each_rank_counts_in_the_demonstration(capsys):
    model = seeded(F.scaled_dot_product_attention)
    right = torch.tensor([alone(model, prompt, module.NEW) for prompt in module.PROMPTS])
    wrong = right.clone()
    wrong[1, -1] += 1
    assert [module.as_one_process(of_ranks) for of_ranks in ([right] * 2, [right, wrong])] == [True, False]


def test_a_cache_refuses_attention_that_is_not_causal():
    q, cache = torch.zeros(1, 1, 1, 2), SpreadCache()
    with pytest.raises(ValueError, match=r"is_causal is False; expected True"):
        cache(q, q, q, is_causal=False)
    with pytest.raises(TypeError, match="attn_mask"):
        cache(q, q, q, attn_mask=q)


def test_under_autocast_the_scores_of_a_new_token_are_computed_in_float32(alone):
    """Of q, k and v in its dtype."""
    cache, parts = SpreadCache(), 3 * torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(SEED))
    cache.begin(torch.arange(4)[None], room=1)
    with torch.autocast("cpu", torch.bfloat16):
        cache.attend(*parts[..., :4, :])
        cache.store(torch.tensor([[4]]))
        out = cache.attend(*parts[..., 4:, :])
    right = naive_attention(*parts.bfloat16().double(), causal=True)[:, :, 4:]
    torch.testing.assert_close(out, right.bfloat16(), rtol=2**-7, atol=1e-4)


def merged(context, states, hosts):
    group = dist.new_group()
    with as_on_hosts(hosts):
        return merge_over_ranks(states[context.rank], group)


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_a_rank_that_sees_no_key_adds_nothing_and_large_scores_do_not_overflow(ranks, hosts):
    m = torch.tensor([[-torch.inf], [1000.0], [998.0]], dtype=torch.float64)
    l = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    o = torch.tensor([[[0.0]], [[3.0]], [[8.0]]], dtype=torch.float64)
    weight = 2 * torch.tensor(-2.0, dtype=torch.float64).exp()
    for largest, total, output in ranks(3, merged, list(zip(m, l, o, strict=True)), hosts):
        assert largest.item() == 1000.0
        torch.testing.assert_close(total, 1 + weight[None])
        torch.testing.assert_close(output[0], 3 + 4 * weight[None])


SIZES = {"B": 2, "H": 4, "G": 2, "D": 8, "n": 1}


def two_tokens(context, token, layer, change, hosts):
    """A prompt and two new tokens in two layers. In one token and layer, rank 1 has other input."""
    group = dist.new_group()
    with as_on_hosts(hosts):
        cache = SpreadCache("contiguous", group=group)
        cache.begin(4 * context.rank + torch.arange(4)[None], room=1)
        for step in range(3):
            if step > 0:
                cache.store(torch.tensor([[11 + step]]))
            for i in range(2):
                changed = change if (step, i, context.rank) == (token, layer, 1) else {}
                options = SIZES | {"n": 1 if step else 4, "window": 7} | changed
                B, H, G, D, n = (options.pop(name) for name in SIZES)
                for _ in range(options.pop("times", 1)):
                    cache.layer = i
                    cache.attend(torch.zeros(B, H, n, D), *torch.zeros(2, B, G, n, D), **options)


OTHER = "rank 1: other input than agreed"
DISAGREE = [
    (0, 1, {"window": 6}, "rank 1: window=6"),
    (1, 0, {"scale": 1.0}, OTHER),
    (1, 1, {"G": 1}, OTHER),
    (1, 1, {"sinks": torch.zeros(4)}, OTHER),
    (1, 0, {"n": 2}, OTHER),
    (1, 1, {"times": 2}, "rank 1: of_every_rank, call 4 with 320 bytes"),
    *((2, 1, change, OTHER) for change in ({"window": 6}, {"B": 1})),
]


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_ranks_that_disagree_about_a_new_token_all_say_so(ranks, hosts):
    for *where, words in DISAGREE:
        assert_refused(ranks, 3, words, two_tokens, *where, hosts)


def refused(context, prompts_of_ranks, new_tokens=2, layouts=("zigzag",) * 3, window=None, other_attention=False):
    new_tokens, window = (x[context.rank] if isinstance(x, tuple) else x for x in (new_tokens, window))
    cache = SpreadCache(layouts[context.rank], window)
    with mock.patch.object(module, "CONFIG", CONFIG):
        model = seeded(SpreadCache() if other_attention and context.rank == 1 else cache)
    with mock.patch.object(Transformer, "forward", side_effect=AssertionError("computed before all ranks agreed")):
        return generate(model, cache, prompts_of_ranks[context.rank], new_tokens)


def with_linear_layers(context):
    cache = SpreadCache()
    generate(Transformer(Config(linear=1), cache), cache, [[1]], 2)


def stored_too_often(context):
    cache = SpreadCache()
    cache.begin(torch.zeros(1, 1, dtype=torch.int64), room=1)
    for step in range(context.world_size + 1):
        cache.store(torch.tensor([[1 + step]]))


GOOD = [[[1]]] * 3
REFUSED = [  # what is done on each rank, and what all say
    (["prompts of [2, 0] tokens", "expected", "1 token or more each"], refused, [[[1, 2], []]] * 3),
    (["prompts of [] tokens", "expected a prompt at least"], refused, [[]] * 3),
    (["0 new ones", "expected", "1 new token or more"], refused, GOOD, 0),
    (["61 is in a prompt", "expected tokens", "from 0 to 60"], refused, [[[1, 61]]] * 3),
    (["-1 is in a prompt", "expected tokens"], refused, [[[1, -1]]] * 3),
    (["'w' is in a prompt", "expected tokens: Python integers"], refused, ["words"] * 3),
    (["disagree about prompts;", "expected the same on each"], refused, [[[1]], [[2]], [[1]]]),
    (["disagree about new_tokens;", "rank 1: new_tokens=3"], refused, GOOD, (2, 3, 2)),
    (["disagree about window;", "rank 1: window=4"], refused, GOOD, 2, ("zigzag",) * 3, (None, 4, None)),
    (["disagree about layout;", "expected the same on each"], refused, GOOD, 2, ("zigzag", "striped", "zigzag")),
    (["rank 1: layout is 'zag'", "expected one of"], refused, GOOD, 2, ("zigzag", "zag", "zigzag")),
    (["window is 0", "expected 1 token or more"], refused, GOOD, 2, ("zigzag",) * 3, 0),
    (["rank 1: the model has another", "expected this cache"], refused, GOOD, 2, ("zigzag",) * 3, None, True),
    (["the model has another attention; expected this cache in every layer"], with_linear_layers),
    (["full after 3 new tokens", "expected `begin` with more room"], stored_too_often),
]


def test_input_that_makes_no_sense_is_refused_on_every_rank_before_the_model_runs(ranks):
    for words, work, *arguments in REFUSED:
        assert_refused(ranks, 3, words, work, *arguments)

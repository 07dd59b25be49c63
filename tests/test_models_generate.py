"""Generation over a spread cache: token for token what one process generates; what it sends; and with mistakes."""

import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from models import generate as module
from models.generate import SpreadCache, alone, generate, merge_over_ranks, seeded
from models.transformer import Config
from tests.attention import SEED
from tests.refusals import all_of, refusal
from training.causal import LAYOUTS

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


def answers(context, layout="zigzag", window=None, lengths=LENGTHS, wrong=None):
    cache = SpreadCache(layout, window)
    with mock.patch.object(module, "CONFIG", CONFIG):
        model = seeded(cache)
    with WRONG[wrong]() if wrong else mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as sent:
        tokens = generate(model, cache, prompts_of(lengths), NEW)
    sizes = [] if wrong else [call.args[0].numel() for call in sent.call_args_list]
    return tokens.tolist(), [k.shape[2] for k, _ in cache.blocks], sizes


def right_answers(window=None, lengths=LENGTHS):
    attention = partial(windowed, window=window) if window else F.scaled_dot_product_attention
    with mock.patch.object(module, "CONFIG", CONFIG):
        model = seeded(attention)
    return [alone(model, prompt, NEW) for prompt in prompts_of(lengths)]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_token_for_token_what_one_process_generates(ranks, size, layout, window):
    for tokens, _, _ in ranks(size, answers, layout, window):
        assert tokens == right_answers(window)


def test_the_caches_stay_equally_long_and_a_token_sends_what_the_formula_says(ranks):
    P, B, D = 3, len(LENGTHS), CONFIG.hidden // CONFIG.heads
    per_rank = ranks(P, answers)
    for _, lengths, sizes in per_rank:
        chunk = 18 // P
        assert all(chunk + (NEW - 1) // P <= length <= chunk + -(-(NEW - 1) // P) for length in lengths)
        of_a_token = [B * CONFIG.heads, B * CONFIG.heads * (D + 1)] * CONFIG.layers
        assert sizes == [B * CONFIG.vocab] + of_a_token * (NEW - 1)
    assert sum(lengths[0] for _, lengths, _ in per_rank) == 18 + NEW - 1


def without_share(state, group=None):
    """The parts are summed as they are: each of them has another max."""
    m, l, o = (x.clone() for x in state)
    for x in (l, o):
        dist.all_reduce(x, group=group)
    return m, l, o


def mean_of_outputs(state, group=None):
    """Every rank's own softmax, averaged over the ranks."""
    m, l, o = state
    out = o / l.masked_fill(l == 0, 1.0)[..., None]
    dist.all_reduce(out, group=group)
    return m, torch.ones_like(l), out / dist.get_world_size(group)


def padding_seen(cache, position, step):
    right_store(cache, position, step)
    cache.at = cache.at.clamp(max=0)


def nowhere(cache, position, step):
    cache.new, cache.layer, cache.mine = position, 0, False


def everywhere(cache, position, step):
    cache.new, cache.layer, cache.mine = position, 0, True
    cache.at = torch.cat([cache.at, position], dim=1)


right_store = SpreadCache.store
WRONG = {
    "stored by no rank": lambda: mock.patch.object(SpreadCache, "store", nowhere),
    "stored by all ranks": lambda: mock.patch.object(SpreadCache, "store", everywhere),
    "parts with another max summed": lambda: mock.patch.object(module, "merge_over_ranks", without_share),
    "mean of the outputs": lambda: mock.patch.object(module, "merge_over_ranks", mean_of_outputs),
    "no merge": lambda: mock.patch.object(module, "merge_over_ranks", lambda state, group=None: state),
    "padding seen": lambda: mock.patch.object(SpreadCache, "store", padding_seen),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("size", [3, 4])
def test_a_wrong_cache_or_merge_is_rejected(ranks, size, wrong):
    lengths = (17, 17, 6)
    right = right_answers(lengths=lengths)
    assert all(tokens == right for tokens, _, _ in ranks(size, answers, "zigzag", None, lengths))
    assert any(tokens != right for tokens, _, _ in ranks(size, answers, "zigzag", None, lengths, wrong))


def merged(context, states):
    return merge_over_ranks(states[context.rank])


def test_a_rank_that_sees_no_key_adds_nothing_and_large_scores_do_not_overflow(ranks):
    m = torch.tensor([[-torch.inf], [1000.0], [998.0]], dtype=torch.float64)
    l = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    o = torch.tensor([[[0.0]], [[3.0]], [[8.0]]], dtype=torch.float64)
    weight = 2 * torch.tensor(-2.0, dtype=torch.float64).exp()
    for largest, total, output in ranks(3, merged, list(zip(m, l, o, strict=True))):
        assert largest.item() == 1000.0
        torch.testing.assert_close(total, 1 + weight[None])
        torch.testing.assert_close(output[0], 3 + 4 * weight[None])


def refused(context, prompts_of_ranks, new_tokens):
    cache = SpreadCache()
    with mock.patch.object(module, "CONFIG", CONFIG):
        return generate(seeded(cache), cache, prompts_of_ranks[context.rank], new_tokens)


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "words"),
    [
        ([[[1, 2], []]] * 3, 2, ["prompts of [2, 0] tokens", "expected", "1 token or more each"]),
        ([[]] * 3, 2, ["prompts of [] tokens", "expected a prompt"]),
        ([[[1]]] * 3, 0, ["0 new ones", "expected", "1 new token or more"]),
        ([[[1]], [[2]], [[1]]], 2, ["different prompts", "expected the same on each"]),
    ],
)
def test_input_that_makes_no_sense_is_refused_on_every_rank(ranks, prompts, new_tokens, words):
    assert re.search(all_of(words), refusal(ranks.outcomes(3, refused, prompts, new_tokens)))

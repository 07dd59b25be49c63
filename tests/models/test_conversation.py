"""A conversation over a spread cache: logits and tokens of one forward pass over all, in parts, whatever travels."""

import re
from functools import lru_cache, partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from ringlab.models import conversation as module
from ringlab.models import generate
from ringlab.models.conversation import GrowingCache, reply
from ringlab.models.generate import EMPTY, alone, seeded
from ringlab.models.transformer import Transformer
from tests.attention import SEED
from tests.mistakes import Mistakes, all_of, refusal
from tests.models.test_generate import CONFIG, windowed

NEW = 4
LENGTHS = ((13, 4), (1, 9), (3, 2))  # of the texts of two conversations, in three turns


def texts_of(turn):
    generator = torch.Generator().manual_seed(turn + 10 * SEED)
    return [torch.randint(CONFIG.vocab, (length,), generator=generator).tolist() for length in LENGTHS[turn]]


def model_of(attention):
    with mock.patch.object(generate, "CONFIG", CONFIG):
        return seeded(attention).double()


def talk(context, settings, part=5, wrong=None):
    """For each turn the answers, and the logits after each text; what travelled; the positions in this rank's slots."""
    cache = GrowingCache(**{name: x for name, x in settings.items() if name != "passing"})
    model, turns, passing = model_of(cache), [], settings.get("passing", "auto")
    with WRONG[wrong]() if wrong else mock.patch.object(module, "read", side_effect=module.read):
        for turn in range(len(LENGTHS)):
            logits = []
            with mock.patch.object(module, "write", side_effect=partial(keep, logits, module.write)):
                turns.append((reply(model, cache, texts_of(turn), NEW, part, passing).tolist(), logits[0]))
    return turns, cache.passed, cache.at


def keep(logits, write, model, cache, those, *args):
    logits.append(those)
    return write(model, cache, those, *args)


@lru_cache
def right(window=None):
    """For each turn, the answers and the logits of one forward pass over everything said before them."""
    model = model_of(partial(windowed, window=window) if window else F.scaled_dot_product_attention)
    said, turns = [[], []], []
    for turn in range(len(LENGTHS)):
        said = [before + text for before, text in zip(said, texts_of(turn), strict=True)]
        with torch.no_grad():
            logits = torch.cat([model(torch.tensor([text]), torch.arange(len(text)))[:, -1] for text in said])
        answers = [alone(model, text, NEW) for text in said]
        turns.append((answers, logits))
        said = [text + answer for text, answer in zip(said, answers, strict=True)]
    return turns


def assert_right(of_ranks, window=None):
    """The tokens are equal; the logits are as near as float64 rounds a model of two layers."""
    for turns, _, _ in of_ranks:
        for (answers, logits), (right_answers, right_logits) in zip(turns, right(window), strict=True):
            assert answers == right_answers
            assert (logits - right_logits).norm() < 1e-10 * right_logits.norm()


@pytest.mark.parametrize(
    ("size", "settings", "part"),
    [
        (1, {}, 5),
        (3, {}, 5),
        (4, {"passing": "KV", "layout": "contiguous"}, 7),
        (5, {"window": 4, "layout": "striped", "passing": "Q"}, 6),
    ],
)
def test_parts_and_turns_give_what_one_forward_pass_gives(ranks, size, settings, part):
    of_ranks = ranks(size, talk, settings, part)
    assert_right(of_ranks, settings.get("window"))
    for text in range(2):
        said = sum(lengths[text] for lengths in LENGTHS) + len(LENGTHS) * NEW - 1  # the last token is not computed
        stored = torch.cat([at[text] for _, _, at in of_ranks])
        assert stored[stored < EMPTY].sort().values.tolist() == list(range(said))
    parts = sum(-(-(max(lengths) + (turn > 0)) // part) for turn, lengths in enumerate(LENGTHS))
    for _, passed, _ in of_ranks:
        assert len(passed) == parts
        if size > 1:  # auto moves K and V for the first part, and queries for late short ones
            assert (passed[0], passed[-1]) == (settings.get("passing", "KV"), settings.get("passing", "Q"))


def generated(context):
    cache = GrowingCache()
    return generate.generate(model_of(cache), cache, texts_of(0), NEW).tolist()


def test_generate_takes_this_cache_too(ranks):
    assert ranks(3, generated) == [right()[0][0]] * 3


WRONG = Mistakes()
right_grow = GrowingCache.grow


@WRONG.replaces(GrowingCache, "grow")
def slots_unsorted(cache, at, room):
    """Positions move to their slots, and K and V stay where they were."""
    right_grow(cache, at, room)
    cache.order = torch.arange(cache.order.shape[1]).expand_as(cache.order)


def test_a_mistake_is_rejected(ranks):
    with pytest.raises(AssertionError):
        assert_right(ranks(3, talk, {}, 5, "slots_unsorted"), None)


def refused(context, change, part=5):
    rank = context.rank
    cache = GrowingCache()
    model, texts = model_of(cache), texts_of(0)
    if change == "texts":
        reply(model, cache, texts, NEW)
        texts = texts[:1]
    part = {"part": 0, "another part": 5 + rank % 2}.get(change, part)
    with mock.patch.object(Transformer, "forward", side_effect=AssertionError("computed before all ranks agreed")):
        return reply(model, cache, texts, NEW, part, "KV" if change == "passing" and rank == 1 else "auto")


REFUSED = {
    "passing": ["disagree about passing"],
    "texts": ["1 texts for 2 conversations", "expected one for each"],
    "part": ["part is 0", "expected 1 token or more"],
    "another part": ["disagree about part"],
}


def test_a_turn_that_makes_no_sense_is_refused_on_every_rank_before_the_model_runs(ranks):
    for change, words in REFUSED.items():
        assert re.search(all_of(words), refusal(ranks.outcomes(3, refused, change))), change


def test_a_layer_with_another_window_than_the_cache_is_refused():
    q = torch.zeros(1, 1, 1, 2)
    with pytest.raises(ValueError, match=r"window 3; expected that of the cache, None"):
        GrowingCache().attend(q, q, q, window=3)

"""What context is for, in bench/: lines found and a bandit. Texts, windows, the same training on any ring, mistakes."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from bench import in_context_rl, retrieval
from bench.in_context_rl import ARMS, CONFIG, TRAJECTORY, choose, cloned, draw_tasks, play, thompson
from bench.retrieval import IDS, START, VALUES, accuracy_by_depth, shard_texts, write_texts
from ringlab.models.transformer import IGNORED, Transformer
from tests.attention import SEED

LINES, BATCH = 8, 3


def texts_of(lines=LINES, batch=BATCH):
    return write_texts(lines, batch, torch.Generator().manual_seed(7 + SEED))


@pytest.mark.parametrize("lines", [2, IDS])
def test_a_text_has_lines_with_ids_of_their_own_and_asks_for_half_of_them_once(lines):
    texts, asked = texts_of(lines)
    assert texts.shape == (BATCH, 1 + 3 * lines)
    assert (texts[:, 0] == START).all()
    ids, values = texts[:, 1:].unflatten(1, (-1, 2)).unbind(2)
    assert ((ids >= 0) & (ids < IDS) & (values >= IDS) & (values < IDS + VALUES)).all()
    for row in range(BATCH):
        assert len(set(ids[row, :lines].tolist())) == lines
        assert len(set(asked[row].tolist())) == lines // 2
    assert torch.equal(ids[:, lines:], ids.gather(1, asked))
    assert torch.equal(values[:, lines:], values.gather(1, asked))
    assert not torch.equal(texts[0], texts[1])
    with pytest.raises(ValueError, match=f"7 lines with {IDS} ids; expected an even number of 2 to {IDS}"):
        texts_of(7)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_have_every_token_with_the_one_before_and_the_labels_of_questions(world_size):
    texts, _ = texts_of()
    seen = []
    for rank in range(world_size):
        tokens, labels, at = shard_texts(texts, rank, world_size)
        seen += at.tolist()
        assert torch.equal(tokens[..., 0], texts[:, at + 1])
        assert torch.equal(tokens[..., 1], texts[:, at])  # never the label: that comes after the token
        for i, place in enumerate(at.tolist()):
            question = place >= 2 * LINES and place % 2 == 0
            assert torch.equal(labels[:, i], texts[:, place + 2] if question else torch.full((BATCH,), IGNORED))
    assert sorted(seen) == list(range(3 * LINES))


class KnowsTheFirstHalf(nn.Module):
    """Reads the values of lines in the first half of a text, and says IDS for the others."""

    def forward(self, tokens, at):
        logits = torch.zeros(*tokens.shape[:2], START + 1)
        logits[..., IDS] = 0.5
        lines = tokens.shape[1] // 3
        for row, text in enumerate(tokens[..., 0]):
            known = dict(text[:lines].view(-1, 2).tolist())
            for place, token in enumerate(text.tolist()):
                if token in known:
                    logits[row, place, known[token]] = 1.0
        return logits


def test_accuracy_is_told_by_depth():
    drawn = mock.patch.object(retrieval, "write_texts", side_effect=write_texts)
    with mock.patch.object(retrieval, "retriever", return_value=KnowsTheFirstHalf()), drawn as texts:
        shares = accuracy_by_depth({}, lines=16, texts=64, seed=3 + SEED)
    assert texts.call_args.args[2].initial_seed() == 1_000_003 + SEED  # no text of the training
    assert shares[:4] == [1.0] * 4
    assert all(share < 0.2 for share in shares[4:])  # 1 in VALUES by chance


# The bandit ----------------------------------------------------------------------------------------------------------

TASKS, PULLS = 60, 5 * TRAJECTORY
FIRST = in_context_rl.START


@pytest.fixture
def rng():
    return np.random.default_rng(11 + SEED)


def always(arm, texts):
    return torch.eye(ARMS)[arm].expand(len(texts), ARMS)


def arms_and_rewards(texts):
    return texts[:, 1:] // 2, texts[:, 1:] % 2


def test_a_player_pulls_the_arms_it_chooses_and_gets_their_rewards(rng):
    tasks = torch.tensor([0.0, 1.0, 0.5]).repeat_interleave(ARMS).view(3, ARMS).double()
    texts, expected = play(partial(always, 7), tasks, PULLS, rng)
    arms, rewards = arms_and_rewards(texts)
    assert texts.shape == (3, 1 + PULLS)
    assert (texts[:, 0] == FIRST).all()
    assert (arms == 7).all()
    assert torch.equal(expected, tasks[:, :1].expand(3, PULLS))
    assert rewards[:2].double().mean(dim=1).tolist() == [0.0, 1.0]
    assert 0 < rewards[2].sum() < PULLS


def test_players_count_by_hand(rng):
    pulls = [2 * 4 + 1] * 200 + [2 * arm for arm in range(ARMS) if arm != 4] * 30  # arm 4 always won, the others never
    texts = torch.tensor([[FIRST, *pulls]]).expand(50, -1)
    assert torch.equal(thompson(texts, rng), always(4, texts).long())
    histories = torch.tensor([[FIRST, 2 * 3, 2 * 3 + 1, 2 * 8, 2 * 3]])
    assert cloned(histories, histories[:, :1]).tolist() == [[0, 0, 0, 3, 0, 0, 0, 0, 1, 0]]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_have_the_same_windows_and_the_arm_of_the_next_pull_as_label(world_size):
    pulls, window, batch = 48, 12, 5
    numbers = FIRST + torch.arange(3 * (1 + pulls)).view(3, -1)  # each token says which history and pull it is
    ranks = [
        list(in_context_rl.shards(numbers, window, 40, batch, SEED, rank, world_size)) for rank in range(world_size)
    ]
    starts = []
    for step in zip(*ranks, strict=True):
        tokens, labels, at = (torch.cat([part[i] for part in step], dim=min(1, 2 - i)) for i in range(3))
        order = at.argsort()
        assert torch.equal(at[order], torch.arange(window))
        first = tokens[:, order[:1]]
        assert torch.equal(tokens[:, order], first + torch.arange(window))
        assert torch.equal(labels[:, order], (first + torch.arange(window) + 1) // 2)
        starts += ((first[:, 0] - FIRST) % (1 + pulls)).tolist()
    assert (min(starts), max(starts)) == (0, pulls - window)  # from the first pull to the last, inside one history
    assert starts.count(0) > len(starts) / 8  # every pull is as often the last one, so 12 of 48 windows begin at 0


def test_a_ring_takes_the_steps_of_one_process(ranks, rng):
    histories, _ = play(partial(thompson, rng=rng), draw_tasks(20, rng), PULLS, rng)
    for train, given in ((retrieval.train, (16, 4, 4, SEED)), (in_context_rl.train, (histories, 16, 4, 4, SEED))):
        one, four = (torch.tensor([mine for _, mine in ranks(P, train, *given)]).mean(dim=0) for P in (1, 4))
        assert one.shape == (4,)
        torch.testing.assert_close(four, one, rtol=1e-4, atol=0)


def test_a_model_chooses_by_the_last_tokens_only():
    torch.manual_seed(SEED)
    model = Transformer(CONFIG)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    texts = torch.randint(FIRST, (3, 20), generator=torch.Generator().manual_seed(SEED))
    changed = texts.clone()
    changed[:, :12] = FIRST
    for window, equal in ((8, True), (9, False)):
        chosen = choose(model, window, texts)
        assert chosen.shape == (3, ARMS)
        torch.testing.assert_close(chosen.sum(dim=1), torch.ones(3))
        assert torch.equal(chosen, choose(model, window, changed)) == equal

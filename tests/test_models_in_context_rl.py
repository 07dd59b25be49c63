"""In-context reinforcement learning: tasks, players, windows of histories, the same training on any ring."""

from functools import partial

import numpy as np
import pytest
import torch

from bench.in_context_rl import (
    ARMS,
    CONFIG,
    START,
    TRAJECTORY,
    choose,
    cloned,
    draw_tasks,
    play,
    shards,
    thompson,
    train,
)
from ringlab.models.transformer import Transformer
from tests.attention import SEED

TASKS, PULLS = 60, 5 * TRAJECTORY


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
    assert (texts[:, 0] == START).all()
    assert (arms == 7).all()
    assert torch.equal(expected, tasks[:, :1].expand(3, PULLS))
    assert rewards[:2].double().mean(dim=1).tolist() == [0.0, 1.0]
    assert 0 < rewards[2].sum() < PULLS


def test_arms_are_pulled_as_often_as_their_probabilities_say(rng):
    odds = torch.zeros(ARMS)
    odds[3], odds[9] = 1.0, 3.0  # their sum need not be 1
    texts, _ = play(lambda texts: odds.expand(len(texts), ARMS), draw_tasks(TASKS, rng), PULLS, rng)
    counts = torch.bincount(arms_and_rewards(texts)[0].flatten(), minlength=ARMS)
    assert counts.sum() == counts[3] + counts[9] == TASKS * PULLS
    standard_error = (0.25 * 0.75 / (TASKS * PULLS)) ** 0.5
    assert abs(counts[3] / (TASKS * PULLS) - 0.25) < 5 * standard_error


def test_the_learner_gets_better_and_cloning_does_not(rng):
    texts, expected = play(partial(thompson, rng=rng), draw_tasks(TASKS, rng), PULLS, rng)
    assert expected[:, -TRAJECTORY:].mean() > expected[:, :TRAJECTORY].mean() + 0.1
    expected = play(partial(cloned, texts), draw_tasks(TASKS, rng), PULLS, rng)[1]
    assert abs(expected.mean() - 0.5) < 0.1


def test_the_learner_counts_rewards_of_each_arm(rng):
    pulls = [2 * 4 + 1] * 200 + [2 * arm for arm in range(ARMS) if arm != 4] * 30  # arm 4 always won, the others never
    texts = torch.tensor([[START, *pulls]]).expand(50, -1)
    assert torch.equal(thompson(texts, rng), always(4, texts).long())


def test_cloning_knows_how_often_each_arm_was_pulled():
    histories = torch.tensor([[START, 2 * 3, 2 * 3 + 1, 2 * 8, 2 * 3]])
    shares = cloned(histories, histories[:, :1])
    assert shares.shape == (1, ARMS)
    assert shares[0].tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_have_the_same_windows_and_the_arm_of_the_next_pull_as_label(world_size):
    pulls, window, batch = 48, 12, 5
    numbers = START + torch.arange(3 * (1 + pulls)).view(3, -1)  # each token says which history and pull it is
    ranks = [list(shards(numbers, window, 4, batch, SEED, rank, world_size)) for rank in range(world_size)]
    starts = []
    for step in zip(*ranks, strict=True):
        tokens, labels, at = (torch.cat([part[i] for part in step], dim=min(1, 2 - i)) for i in range(3))
        order = at.argsort()
        assert torch.equal(at[order], torch.arange(window))
        first = tokens[:, order[:1]]
        assert torch.equal(tokens[:, order], first + torch.arange(window))
        assert torch.equal(labels[:, order], (first + torch.arange(window) + 1) // 2)
        place = (first[:, 0] - START) % (1 + pulls)
        assert (place <= pulls - window).all()  # inside one history
        starts += place.tolist()
    assert len(set(starts)) > 1
    assert 0 in starts


def test_a_window_as_long_as_the_history_begins_at_its_start():
    histories = torch.full((4, 1 + 24), 3)
    histories[:, 0] = START
    for tokens, _, _ in shards(histories, 24, 3, 4, SEED, 0, 1):
        assert (tokens[:, 0] == START).all()


def test_a_ring_takes_the_steps_of_one_process(ranks, rng):
    histories, _ = play(partial(thompson, rng=rng), draw_tasks(20, rng), PULLS, rng)
    losses = {
        world_size: torch.tensor([mine for _, mine in ranks(world_size, train, histories, 16, 5, 4, SEED)]).mean(dim=0)
        for world_size in (1, 2, 4)
    }
    assert losses[1].shape == (5,)
    for world_size in (2, 4):
        torch.testing.assert_close(losses[world_size], losses[1], rtol=1e-4, atol=0)


def test_a_model_chooses_by_the_last_tokens_only():
    torch.manual_seed(SEED)
    model = Transformer(CONFIG)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    texts = torch.randint(START, (3, 20), generator=torch.Generator().manual_seed(SEED))
    changed = texts.clone()
    changed[:, :12] = START
    for window, equal in ((8, True), (9, False)):
        chosen = choose(model, window, texts)
        assert chosen.shape == (3, ARMS)
        torch.testing.assert_close(chosen.sum(dim=1), torch.ones(3))
        assert torch.equal(chosen, choose(model, window, changed)) == equal

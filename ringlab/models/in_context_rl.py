"""In-context reinforcement learning in small: a model sees how a learner tries, and learns to learn.

    history   START          arm 3, no reward     arm 7, reward      arm 7, reward     ...
    label     arm 3          arm 7                arm 7              ...               the learner's next choice

A task is a bandit: 10 arms, each with its own probability of a reward, which nobody tells. A trajectory is 8 pulls. The
learner is Thompson sampling, on a thousand tasks. The model learns to choose as the learner does, given what it sees.
Then it plays new tasks with fixed weights: all that it knows of a task is in its context. One rank's memory allows n
trajectories of context, a ring of 4 allows 4n. Behaviour cloning has no context: how often each arm was pulled in all
histories says nothing about a new task.

What this is not: table 5 of the paper has robots that walk and reach, and trajectories sorted by their return.

Shapes: a pull is one token, 2 · arm + reward. A text is START and the pulls, (B, 1 + S); a rank has tokens and labels
(B, C) at positions (C,). Tasks and probabilities are (B, ARMS), float64.

    $ python -m ringlab.models.in_context_rl
    the mean reward of a pull on 200 new tasks, in each trajectory of 8 pulls
    ...
    ok    learner and model get better from trajectory to trajectory, cloning does not

Before: retrieval.py. After: generate.py. bench/in_context_rl.py trains with n and with 4n trajectories.
Source: Laskin et al. 2023 (Algorithm Distillation), section 3; Liu et al. 2024, table 5; Thompson 1933.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ringlab.models.retrieval import Shard, fit, init_weights
from ringlab.models.transformer import Config, Transformer, shard_text
from ringlab.support.processes import RankContext, launch
from ringlab.training.flash_ring import scaled_dot_product_attention

ARMS, TRAJECTORY = 10, 8  # pulls of a trajectory
START = 2 * ARMS
CONFIG = Config(vocab=START + 1, layers=2, hidden=64, heads=2, kv_heads=2, feedforward=128)

Player = Callable[[Tensor], Tensor]  # texts so far (B, 1 + pulls) -> the probability of each arm (B, ARMS)


def draw_tasks(batch: int, rng: np.random.Generator) -> Tensor:
    """The probability of a reward of each arm: (B, ARMS), uniform in 0 ... 1."""
    return torch.from_numpy(rng.random((batch, ARMS)))


def play(player: Player, tasks: Tensor, pulls: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """What a player does on tasks (B, ARMS): texts (B, 1 + pulls), and the expected reward of each pull (B, pulls)."""
    rows, texts, expected = torch.arange(len(tasks)), torch.full((len(tasks), 1), START), []
    for _ in range(pulls):
        below = player(texts).double().cumsum(dim=1)  # (B, ARMS)
        arm = (below < torch.from_numpy(rng.random((len(tasks), 1))) * below[:, -1:]).sum(dim=1)
        expected.append(tasks[rows, arm])
        reward = torch.from_numpy(rng.random(len(tasks))) < expected[-1]
        texts = torch.cat([texts, (2 * arm + reward)[:, None]], dim=1)
    return texts, torch.stack(expected, dim=1)


def thompson(texts: Tensor, rng: np.random.Generator) -> Tensor:
    """Draw what each arm's probability may be, given its pulls so far, and choose the best: (B, ARMS), 0 or 1."""
    counts = F.one_hot(texts[:, 1:], START).sum(dim=1).unflatten(1, (ARMS, 2)).numpy()  # (B, ARMS, 2): losses, wins
    guess = torch.from_numpy(rng.beta(1 + counts[..., 1], 1 + counts[..., 0]))
    return F.one_hot(guess.argmax(dim=1), ARMS)


def shards(
    histories: Tensor, window: int, steps: int, batch: int, seed: int, rank: int, world_size: int
) -> Iterator[Shard]:
    """This rank's part of each step: `window` tokens from each of `batch` histories (N, 1 + pulls)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(histories), (batch, 1), generator=generator)
        last = torch.randint(histories.shape[1] - 1, (batch, 1), generator=generator)
        starts = (last + 1 - window).clamp(min=0)  # every pull is as often the last one
        texts = histories[rows, starts + torch.arange(window + 1)]
        tokens, labels, at = shard_text(texts, "zigzag", rank, world_size)
        yield tokens, labels // 2, at  # the arm of the next pull


def train(
    context: RankContext, histories: Tensor, window: int, steps: int, batch: int, seed: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Train in a ring of all ranks on windows of histories (N, 1 + pulls). Returns what `retrieval.fit` does."""
    torch.manual_seed(seed)
    model = Transformer(CONFIG, partial(scaled_dot_product_attention, layout="zigzag"))
    init_weights(model)
    mine = shards(histories, window, steps, batch, seed, context.rank, context.world_size)
    return fit(model.to(context.device), mine)


@torch.no_grad()
def choose(model: Transformer, window: int, texts: Tensor) -> Tensor:
    """The model as a player: the probability of each arm (B, ARMS), given the last `window` tokens."""
    tokens = texts[:, -window:]
    return model(tokens, torch.arange(tokens.shape[1]))[:, -1, :ARMS].softmax(dim=1)


def cloned(histories: Tensor, texts: Tensor) -> Tensor:
    """Behaviour cloning without context: how often each arm is pulled in all histories, (B, ARMS)."""
    return torch.bincount(histories[:, 1:].flatten() // 2, minlength=ARMS).expand(len(texts), ARMS)


PULLS, STEPS, BATCH, TASKS = 32, 80, 32, 200  # of the run below


def main() -> int:
    rng = np.random.default_rng(0)
    tasks = draw_tasks(TASKS, rng)
    learner = partial(thompson, rng=rng)
    histories, _ = play(learner, draw_tasks(1024, rng), PULLS, rng)
    weights, _ = launch(train, 4, histories, PULLS, STEPS, BATCH, 0)[0]
    model = Transformer(CONFIG)
    model.load_state_dict(weights)
    print(f"the mean reward of a pull on {TASKS} new tasks, in each trajectory of {TRAJECTORY} pulls")
    players = {
        "Thompson sampling": learner,
        f"the model, {STEPS} steps in a ring of 4": partial(choose, model, PULLS),
        "behaviour cloning": partial(cloned, histories),
    }
    gains = []
    for name, player in players.items():
        reward = play(player, tasks, PULLS, rng)[1].unflatten(1, (-1, TRAJECTORY)).mean(dim=(0, 2))
        gains.append((reward[-1] - reward[0]).item())
        print(f"{name:<35}{'   '.join(f'{x:.2f}' for x in reward)}")
    right = gains[0] > 0.15 and gains[1] > 0.05 and abs(gains[2]) < 0.03
    verdict = "ok   " if right else "WRONG"
    print(f"{verdict} learner and model get better from trajectory to trajectory, cloning does not")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

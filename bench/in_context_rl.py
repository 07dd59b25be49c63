"""In-context reinforcement learning with n and with 4n trajectories in the context: the return on tasks never seen.

    history   START          arm 3, no reward     arm 7, reward      arm 7, reward     ...
    label     arm 3          arm 7                arm 7              ...               the learner's next choice

A task is a bandit: 10 arms, each with its own probability of a reward, which nobody tells. A trajectory is 8 pulls. The
learner is Thompson sampling, on a thousand tasks. The model learns to choose as the learner does, given what it sees.
Then it plays new tasks with fixed weights: all that it knows of a task is in its context.

One rank's memory allows a context of n = 4 trajectories. A ring of 4 trains on 4n = 16, with the same memory on each
rank. Both learn from the same histories. The shorter context takes 4 times as many steps, so that both learn from as
many pulls. Then they play new tasks for 16 trajectories; the shorter context always holds the last 4. Beside them:
Thompson sampling, from which both learned; behaviour cloning, which has no context: how often each arm was pulled in
all histories; and the best arm. Table 5 of the paper, in small: there robots walk and reach, and trajectories are
sorted by their return.

Shapes: a pull is one token, 2 · arm + reward. A text is START and the pulls, (B, 1 + S); a rank has tokens and labels
(B, C) at positions (C,). Tasks and probabilities are (B, ARMS), float64.

    $ python -m bench in_context_rl            # all seeds
    $ python -m bench in_context_rl --quick    # less than a minute, one seed, nothing is written

Source: Laskin et al. 2023 (Algorithm Distillation), section 3; Liu et al. 2024, table 5; Thompson 1933.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import record
from bench.record import Bench, Results
from bench.retrieval import Shard, fit, init_weights
from ringlab.models.transformer import Config, Transformer, shard_text
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.support.processes import RankContext, launch

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


RUNS = {"n, one process": 1, "4n, ring of 4": 4}  # ranks; each has as many tokens
LEARNER, CLONING, BEST = "Thompson sampling", "behaviour cloning", "the best arm"


def by_trajectory(expected: torch.Tensor) -> list[float]:
    """The mean expected reward of a pull in each trajectory, for the expected rewards (B, pulls)."""
    return expected.unflatten(1, (-1, TRAJECTORY)).mean(dim=(0, 2)).tolist()


def in_context_rl(seeds: list[int], **sizes: int) -> Results:
    """A row for each player and seed."""
    players = [*RUNS, LEARNER, CLONING, BEST]
    every = [{"player": player, "seed": seed} for seed in seeds for player in players]
    return {"rows": record.rows("in_context_rl", sizes, every, partial(reward_of, **sizes))}


def reward_of(
    player: str, seed: int, *, trajectories: int, steps: int, batch: int, histories: int, tasks: int
) -> Results:
    """Train, or only play: the mean reward in each trajectory on new tasks."""
    past_rng, rng = (np.random.default_rng([seed, i]) for i in range(2))
    pulls, new = 4 * trajectories * TRAJECTORY, draw_tasks(tasks, rng)
    if player == BEST:
        return {"reward": by_trajectory(new.max(dim=1, keepdim=True).values.expand(-1, pulls))}
    choice = partial(thompson, rng=rng)
    if player != LEARNER:
        past, _ = play(partial(thompson, rng=past_rng), draw_tasks(histories, past_rng), pulls, past_rng)
        choice = partial(cloned, past)
    if player in RUNS:
        window = RUNS[player] * trajectories * TRAJECTORY
        weights, _ = launch(train, RUNS[player], past, window, steps * 4 // RUNS[player], batch, seed)[0]
        model = Transformer(CONFIG)
        model.load_state_dict(weights)
        choice = partial(choose, model, window)
    return {"reward": by_trajectory(play(choice, new, pulls, rng)[1])}


def rewards(results: Results, player: str) -> torch.Tensor:
    """The mean reward of a pull: (seeds, trajectories)."""
    return torch.tensor([row["reward"] for row in results["rows"] if row["player"] == player], dtype=torch.float64)


def tables(results: Results) -> list[str]:
    n, rows = results["trajectories"], []
    for player in (CLONING, *RUNS, LEARNER, BEST):
        seen = rewards(results, player)
        columns = [seen[:, 0], seen[:, n - 1], seen[:, -1], seen.mean(dim=1)]
        rows.append([player, *(f"{x.mean():.3f} ± {x.std(correction=0):.3f}" for x in columns)])
    return [record.grid(f"<player | first trajectory | trajectory {n} | trajectory {4 * n} | all {4 * n}", rows)]


BENCHES = [
    Bench(
        "in_context_rl",
        in_context_rl,
        tables,
        {"trajectories": 4, "seeds": [0, 1, 2], "steps": 200, "batch": 32, "histories": 1024, "tasks": 128},
        quick={"trajectories": 2, "seeds": [0], "steps": 80, "batch": 32, "histories": 512, "tasks": 64},
    )
]

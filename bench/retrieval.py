"""Line retrieval with 1 x and with 4 x the context: which lines does a model find, by length of the text and by depth?

    text      line 17: REGISTER_CONTENT is <5>    line 202: REGISTER_CONTENT is <31> ...  line 17: REGISTER_CONTENT is
    tokens         17                   v5              202                   v31     ...       17
    label                                                                                       v5

One rank's memory allows texts of 32 lines. A ring of 4 trains on texts of 128 lines, with the same memory on each rank:
as many tokens, and as many bytes kept for the backward pass (counted). Both take the same number of steps with the same
number of texts. Then both read new texts, also longer ones than they were trained on. Figure 3 of the paper, in small.
The first model also reads each text with its positions squeezed into those of 32 lines (Chen et al. 2023). Longer texts
are more tokens, too: another model reads as many, texts of 32 lines in 4 times as many steps.

A value must be found by the id before it. So the embedding of a token also tells which token came before it. In a ring
that one is often on another rank, so each rank takes it from the text. Without this, a model of this size learned
nothing in 2,000 steps.

Shapes: n lines and n/2 questions are S = 3n tokens, an id and a value each. A rank has tokens (B, C, 2), each with the
token before it; labels (B, C), IGNORED except at the ids of questions; positions (C,).

    $ python -m bench retrieval

In a minute: BENCHES["retrieval"].run(lines=8, ids=64, seeds=[0], steps=240, questions=1024).

Source: Liu et al. 2024, figure 3; Li et al. 2023 (LongChat), for the task; Olsson et al. 2022, for the token before it.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench import record
from bench.memory import kept_bytes
from bench.record import Results, bench
from ringlab.models.train import WARM_UP, take_step
from ringlab.models.transformer import IGNORED, Config, Transformer, summed_loss
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import positions
from ringlab.support.processes import RankContext, launch

IDS, VALUES = 256, 32
START = IDS + VALUES  # the token before the first one
CONFIG = Config(vocab=START + 1, layers=2, hidden=64, heads=2, kv_heads=2, feedforward=128)
SHORTEST, DEPTHS, RATE = 8, 8, 3e-3  # lines; parts of a text, for which accuracy is told; learning rate


class PairEmbedding(nn.Embedding):
    """tokens (B, C, 2), each with the token before it -> (B, C, hidden): half from the one, half from the other."""

    def forward(self, tokens: Tensor) -> Tensor:
        own, before = super().forward(tokens).unbind(2)
        half = self.embedding_dim // 2
        return torch.cat([own[..., :half], before[..., half:]], dim=2)


def write_texts(lines: int, batch: int, generator: torch.Generator, ids: int = IDS) -> tuple[Tensor, Tensor]:
    """Texts (B, 1 + S), S = 3 · lines: START, lines, questions with their answers; and where each question's line is.

    The ids of a text are all different, and no line is asked for twice. The places of the lines are (B, lines / 2).
    Raises ValueError for an odd number of lines, and for more lines than `ids`.
    """
    if lines % 2 or not 2 <= lines <= ids <= IDS:
        raise ValueError(f"{lines} lines with {ids} ids; expected an even number of 2 to {min(ids, IDS)}")
    drawn = torch.rand(batch, ids, generator=generator).argsort(dim=1)[:, :lines]
    values = IDS + torch.randint(VALUES, drawn.shape, generator=generator)
    asked = torch.rand(batch, lines, generator=generator).argsort(dim=1)[:, : lines // 2]
    pairs = torch.stack([drawn, values], dim=2)  # (B, lines, 2)
    pairs = torch.cat([pairs, pairs[torch.arange(batch)[:, None], asked]], dim=1)
    return F.pad(pairs.flatten(1), (1, 0), value=START), asked


def shard_texts(texts: Tensor, rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens (B, C, 2), labels (B, C) and positions (C,), zigzag; errors as `positions`.

    Pairs and labels are made from the whole text and shared out then: both cross the borders of chunks.
    """
    seq_len = texts.shape[1] - 1
    at = positions("zigzag", seq_len, rank, world_size)
    pairs = torch.stack([texts[:, 1:], texts[:, :-1]], dim=2)
    labels = F.pad(texts[:, 2:], (0, 1), value=IGNORED)
    place = torch.arange(seq_len)
    labels[:, (place < seq_len // 3 * 2) | (place % 2 == 1)] = IGNORED  # lines; answers
    return pairs[:, at], labels[:, at], at


def retriever(attention: Callable[..., Tensor], seed: int) -> Transformer:
    """The model of transformer.py, with an embedding of pairs."""
    torch.manual_seed(seed)
    model = Transformer(CONFIG, attention)
    model.embedding = PairEmbedding(CONFIG.vocab, CONFIG.hidden)
    init_weights(model)
    return model


def init_weights(model: Transformer) -> None:
    """Give every matrix weights of size 1/√hidden. With 0.02, which is for large models, a small one learns later."""
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=model.norm.weight.numel() ** -0.5)


Shard = tuple[Tensor, Tensor, Tensor]  # a rank's tokens, labels and positions


def fit(model: Transformer, shards: Iterable[Shard]) -> tuple[dict[str, Tensor], list[float]]:
    """Take a step of AdamW on each batch, of which `shards` are this rank's parts; every rank has all the weights.

    Returns the weights and this rank's parts of the losses, whose mean over the ranks is the loss.
    """
    torch.set_num_threads(1)  # two are no faster with tensors this small, and on a busy machine much slower
    device = next(model.parameters()).device
    copies = DistributedDataParallel(model)  # averages gradients: take_step multiplies the loss by P
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    rates = (RATE * min(1, step / WARM_UP) for step in count(1))
    losses = [
        take_step(copies, optimizer, *(x.to(device) for x in shard), rate=rate).item()
        for shard, rate in zip(shards, rates, strict=False)
    ]
    return {name: weight.cpu() for name, weight in model.state_dict().items()}, losses


def shards(
    lines: int, steps: int, batch: int, seed: int, rank: int, world_size: int, ids: int = IDS
) -> Iterator[Shard]:
    """This rank's part of each step. The texts of a step have 8, 16, 32, ... or `lines` lines: that is drawn."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        doubled = int(torch.randint((lines // SHORTEST).bit_length(), (), generator=generator))
        texts, _ = write_texts(SHORTEST * 2**doubled, batch, generator, ids)
        yield shard_texts(texts, rank, world_size)


def train(
    context: RankContext, lines: int, steps: int, batch: int, seed: int, ids: int = IDS
) -> tuple[dict[str, Tensor], list[float]]:
    """Train in a ring of all ranks on texts of up to `lines` lines. Returns what `fit` does."""
    model = retriever(partial(scaled_dot_product_attention, layout="zigzag"), seed)
    return fit(model.to(context.device), shards(lines, steps, batch, seed, context.rank, context.world_size, ids))


@torch.no_grad()
def accuracy_by_depth(
    weights: dict[str, Tensor], lines: int, texts: int, seed: int, ids: int = IDS, squeeze: float = 1.0
) -> list[float]:
    """The share of right answers, for lines in each eighth of new texts, the first eighth first.

    Positions are multiplied by `squeeze`: with 1/4, a text spans the positions of one 4 times as short (Chen et al.
    2023, position interpolation). One process reads the texts: without a backward pass it keeps nothing.
    """
    model = retriever(F.scaled_dot_product_attention, seed)
    model.load_state_dict(weights)
    text, asked = write_texts(lines, texts, torch.Generator().manual_seed(1_000_000 + seed), ids)
    tokens, labels, at = shard_texts(text, 0, 1)
    right = (model(tokens, at * squeeze).argmax(dim=2) == labels)[labels != IGNORED].double()
    depth = (asked * DEPTHS // lines).flatten()
    return (torch.bincount(depth, right, minlength=DEPTHS) / torch.bincount(depth, minlength=DEPTHS)).tolist()


def kept_by_a_step(context: RankContext, lines: int, batch: int) -> tuple[int, int]:
    """This rank's tokens in a step with texts of `lines` lines, and the bytes that it keeps for the backward pass."""
    model = retriever(partial(scaled_dot_product_attention, layout="zigzag"), 0)
    tokens, labels, at = shard_texts(write_texts(lines, batch, torch.Generator())[0], context.rank, context.world_size)
    return labels.numel(), kept_bytes(model, lambda: summed_loss(model(tokens, at), labels))


SQUEEZED, LONGER = "1 x, positions squeezed", "1 x, 4 x the steps"
RUNS = {"1 x, one process": 1, "4 x, ring of 4": 4, SQUEEZED: 1, LONGER: 1}  # ranks; each has as many tokens


def lengths(lines: int) -> list[int]:
    """The numbers of lines that all models read: from what one rank trains on to twice what the ring does."""
    return [lines * 2**i for i in range(4)]


def work(context: RankContext, lines: int, steps: int, batch: int, seed: int, ids: int) -> Any:
    """On each rank: the weights, its losses, its tokens in a step, and the bytes that it keeps of them."""
    return *train(context, lines, steps, batch, seed, ids), *kept_by_a_step(context, lines, batch)


def accuracies(results: Results, name: str) -> torch.Tensor:
    """The share of right answers of a run: (seeds, lengths, depths)."""
    return torch.tensor([row["accuracy"] for row in results["rows"] if row["run"] == name], dtype=torch.float64)


def tables(results: Results) -> list[str]:
    rows = []
    for name in RUNS:
        row = next(row for row in results["rows"] if row["run"] == name)
        shares = 100 * accuracies(results, name).mean(dim=2)  # (seeds, lengths)
        cells = [f"{s.mean():.1f} ({s.min():.1f} to {s.max():.1f})" for s in shares.T]
        rows.append([name, f"{max(row['tokens']):,}", f"{max(row['kept_bytes']) / 2**20:.2f} MiB", *cells])
    heads = [
        "<model",
        "tokens of a rank",
        "kept for the backward pass",
        *(f"{n} lines" for n in lengths(results["lines"])),
    ]
    return [record.grid(" | ".join(heads), rows)]


@bench(tables, lines=32, ids=IDS, seeds=[0, 1, 2], steps=400, batch=16, questions=4096)
def retrieval(lines: int, ids: int, seeds: list[int], steps: int, batch: int, questions: int) -> Results:
    """A row for each model and seed: it is trained, and reads new texts."""

    def measure(run: str, seed: int) -> Results:
        all_steps = steps * (4 if run == LONGER else 1)  # as many tokens in all as the ring
        ranks = launch(work, RUNS[run], lines * RUNS[run], all_steps, batch, seed, ids)
        read = []
        for n in lengths(lines):
            squeeze = lines / n if run == SQUEEZED else 1.0
            read.append(accuracy_by_depth(ranks[0][0], n, 2 * questions // n, seed, ids, squeeze))
        losses, tokens, kept = zip(*(of_rank[1:] for of_rank in ranks), strict=True)
        mean = torch.tensor(losses).mean(dim=0).tolist()
        return {"losses": mean, "tokens": tokens, "kept_bytes": kept, "accuracy": read}

    every = [{"run": name, "seed": seed} for seed in seeds for name in RUNS]
    return {"rows": record.rows("retrieval", every, measure)}

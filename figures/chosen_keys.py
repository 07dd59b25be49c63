"""Which keys each query chose, in a text of three topics, and which blocks nobody asked for: from a run on 8 ranks."""

from functools import cache

import torch
from matplotlib.patches import Rectangle
from torch import Tensor

from figures import shapes
from ringlab.ring.chosen_keys import chosen_of_rank
from ringlab.support import drawing
from ringlab.support.processes import launch

TOPICS, C, COUNT = (0, 1, 2, 0, 2, 1, 0, 1), 8, 4  # of each rank's chunk; tokens of a chunk; keys that a query chooses
P, S = len(TOPICS), len(TOPICS) * C


@cache
def index() -> tuple[Tensor, Tensor, Tensor]:
    """index_q (1, 2, S, 4), index_weights (1, 2, S) and index_k (1, S, 4): those of one topic point the same way."""
    generator = torch.Generator().manual_seed(0)
    ways = torch.eye(4)[torch.tensor(TOPICS).repeat_interleave(C)]  # (S, 4)
    q = ways + 0.2 * torch.randn(1, 2, S, 4, generator=generator)
    return q, torch.ones(1, 2, S), 2 * ways[None] + 0.2 * torch.randn(1, S, 4, generator=generator)


@cache
def chosen() -> Tensor:
    """The positions (S, COUNT) that the queries chose on 8 ranks; -1: none."""
    return torch.cat(launch(chosen_of_rank, P, index(), COUNT, "contiguous"), dim=1)[0]


def asked() -> Tensor:
    """Whether a query of a rank chose a key of a block: (P, P), bool."""
    blocks = torch.zeros(P, P, dtype=torch.bool)
    for query, keys in enumerate(chosen().tolist()):
        blocks[query // C, [key // C for key in keys if key >= 0]] = True
    return blocks


def draw() -> drawing.Picture:
    """A map of 64 queries, from top to bottom, and 64 keys, from left to right, in 8 chunks of 8. Dots in the colour of
    their block are the 4 keys that each query chose. A query chose keys of its own topic, which lie in few blocks, near
    and far. Of the 36 blocks of keys that the causal mask shows, 18 have a dot. The other 18 are grey: nobody asked for
    them, so no rank computes them.
    """
    wanted = asked()
    past, shown = P * (P + 1) // 2, int(wanted.sum())
    said = f"{P} ranks of {C} tokens, {COUNT} keys a query. Grey: {past - shown} of {past} blocks that nobody asked for"
    figure, _ = shapes.headed(760, draw, "Each query chooses its keys from the whole text", {65: said})
    ax = shapes.numbers(figure, (0.17, 0.09, 0.68, 0.79), x="position of the key", y="position of the query")
    ax.grid(visible=False)
    for rank in range(P):
        for j in range(rank + 1):
            look = {"fc": drawing.CARD if wanted[rank, j] else "#B8BDC4", "ec": drawing.PAGE, "lw": 2}
            ax.add_patch(Rectangle((j * C - 0.5, rank * C - 0.5), C, C, **look))
    for query, keys in enumerate(chosen().tolist()):
        for key in (key for key in keys if key >= 0):
            ax.plot(key, query, "o", ms=4.5, color=drawing.colour(key // C))
    middles = [C * j + (C - 1) / 2 for j in range(P)]
    ax.set_xticks(middles, [f"block {j}" for j in range(P)])
    ax.set_yticks(middles, [f"rank {r}, topic {'ABC'[topic]}" for r, topic in enumerate(TOPICS)])
    ax.set(xlim=(-0.5, S - 0.5), ylim=(S - 0.5, -0.5))
    return figure

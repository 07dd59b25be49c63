"""The loss of each token: of a right shard, of labels shifted on each rank, and of positions counted on each rank.

Drawn from the losses of a small transformer that knows TEXT by heart. It runs in one process, and gets the labels or
the positions that four ranks would make.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from figures import shapes
from ringlab.models.transformer import Config, Transformer, summed_loss
from ringlab.ring.layouts import positions
from ringlab.support import drawing
from ringlab.support.colours import ink_on

TEXT = torch.tensor([list(b"Shift the labels, then share out!")])  # (1, S + 1)
S, P, LAYOUT = TEXT.shape[1] - 1, 4, "zigzag"
RIGHT_LABELS, RIGHT_POSITIONS = TEXT[0, 1:], torch.arange(S)
LEFT, CELL, TOPS, HEIGHT = 118, 27, (132, 338, 544), 104  # pixels, of the three rows of bars
HIGHEST = 12  # the loss at the top of a row


@cache
def trained_model() -> Transformer:
    """A transformer of one layer, float64, that knows TEXT by heart."""
    torch.manual_seed(0)
    model = Transformer(Config(layers=1, tied=True)).double()
    adam = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(80):
        loss = summed_loss(model(TEXT[:, :-1], torch.arange(S)), TEXT[:, 1:]) / S
        adam.zero_grad()
        loss.backward()
        adam.step()
    return model


def on_each_rank(make: Callable[[Tensor], Tensor]) -> Tensor:
    """What `make` makes of each rank's tokens (C,), put back in the order of the sequence: (S,)."""
    whole = torch.empty(S, dtype=torch.int64)
    for rank in range(P):
        at = positions(LAYOUT, S, rank, P)
        whole[at] = make(TEXT[0, at])
    return whole


def token_losses(model: Transformer, labels: Tensor, at: Tensor) -> Tensor:
    """The loss of each token of TEXT, with these labels (S,) and positions (S,): (S,)."""
    with torch.no_grad():
        return F.cross_entropy(model(TEXT[:, :-1], at)[0], labels, reduction="none")


def runs() -> dict[str, tuple[Tensor, Tensor]]:
    """The labels and the positions of each row of the picture, both (S,)."""
    return {
        "right": (RIGHT_LABELS, RIGHT_POSITIONS),
        "labels shifted on each rank": (on_each_rank(lambda tokens: tokens.roll(-1)), RIGHT_POSITIONS),
        "positions counted on each rank": (RIGHT_LABELS, on_each_rank(lambda tokens: torch.arange(len(tokens)))),
    }


def _letter(token: Tensor) -> str:
    return chr(token).replace(" ", "␣")


def _row(ax: Axes, top: int, name: str, labels: Tensor, at: Tensor) -> None:
    """Bars of the losses, and below them the tokens and what they were given, wrong ones on a dark box."""
    losses, floor = token_losses(trained_model(), labels, at), top + HEIGHT
    given, right, what = (
        (labels, RIGHT_LABELS, "label") if torch.equal(at, RIGHT_POSITIONS) else (at, RIGHT_POSITIONS, "position")
    )
    drawing.write(ax, 20, top - 26, f"{name}: mean loss {losses.mean():.2f}, largest {losses.max():.2f}", weight="bold")
    for loss in range(0, HIGHEST + 1, 4):
        y = floor - HEIGHT * loss / HIGHEST
        ax.plot([LEFT, LEFT + CELL * S], [y, y], color=drawing.FAINT, lw=0.8, zorder=0)
        drawing.write(ax, LEFT - 10, y, str(loss), ha="right", color=drawing.MUTED)
    drawing.write(ax, 20, top + HEIGHT / 2, "loss", color=drawing.MUTED)
    drawing.write(ax, 20, floor + 20, "token", color=drawing.MUTED)
    drawing.write(ax, 20, floor + 45, what, color=drawing.MUTED)
    for rank in range(P):
        for i in positions(LAYOUT, S, rank, P).tolist():
            x, size = LEFT + CELL * i, HEIGHT * losses[i].item() / HIGHEST
            ax.add_patch(Rectangle((x + 2, floor - size), CELL - 4, size, fc=drawing.colour(rank), lw=0))
            shapes.box(ax, x + 1, floor + 9, CELL - 2, 22, fc=drawing.colour(rank))
            drawing.write(
                ax, x + CELL / 2, floor + 20, _letter(TEXT[0, i]), ha="center", color=ink_on(drawing.colour(rank))
            )
            wrong = bool(given[i] != right[i])
            if wrong:
                shapes.box(ax, x + 1, floor + 34, CELL - 2, 22, fc=drawing.INK)
            text = _letter(given[i]) if what == "label" else str(given[i].item())
            drawing.write(ax, x + CELL / 2, floor + 45, text, ha="center", color=drawing.PAGE if wrong else drawing.INK)


def draw() -> drawing.Picture:
    """Three rows of bars: the loss of each of 32 tokens, dealt out to 4 ranks in the zigzag layout. First row, right
    labels and positions: no bar can be seen. Second row, labels shifted on each rank: 7 bars from 6 to 11, at the last
    tokens of pieces, and no others. Third row, positions counted on each rank: bars of up to 10 in five of the eight
    pieces, and none in the first.
    """
    title = "Two mistakes that raise no error, in the loss of each token"
    key = f"loss: −log of the label's probability. {S} tokens on {P} ranks, {LAYOUT}. A colour: one rank. Dark: wrong"
    figure, ax = shapes.headed(722, draw, title, {66: key})
    for top, (name, (labels, at)) in zip(TOPS, runs().items(), strict=True):
        _row(ax, top, name, labels, at)
    return figure

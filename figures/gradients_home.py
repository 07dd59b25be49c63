"""The backward pass of the ring: dK and dV travel with their block, grow on the other ranks, and go home.

They make as many hops as K and V: what a rank finds for its own block is at home already. In the paper it travels too.

Drawn from a ring that computes, in one process, with ringlab/ring/backward.py's `block_backward`. The small boxes
are the ranks that have added to the gradients in hand. The errors are those of the dK in hand.
"""

from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from torch import Tensor

from figures import shapes
from ringlab.basics.naive_attention import TOKENS, naive_attention
from ringlab.ring.backward import block_backward
from ringlab.support import drawing
from ringlab.support.colours import ink_on

P = 4
CELL, STEP = (152, 92), (174, 132)  # pixels: a cell, and from one to the next
LEFT, TOP, SLOT = 142, 132, 22  # and from one small box to the next


@dataclass(frozen=True)
class InHand:
    """What a rank holds after it has computed in a round, or when the gradients are home."""

    block: int
    added: list[int]  # the ranks whose queries are in dK and dV, in the order in which they were added
    d_k: Tensor  # (1, 1, C, 2)
    d_v: Tensor


def problem() -> tuple[Tensor, Tensor, list[Tensor]]:
    """The 8 tokens x (1, 1, 8, 2), the gradient by out that comes from above, and autograd's [dq, dk, dv]."""
    x = TOKENS[None, None]
    d_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    q, k, v = (x.clone().requires_grad_() for _ in "qkv")
    return x, d_out, list(torch.autograd.grad(naive_attention(q, k, v), (q, k, v), d_out))


def travel() -> list[list[InHand]]:
    """Run the backward ring and note who holds what: P rounds, then home; each a list by rank."""
    x, d_out, _ = problem()
    scale = x.shape[-1] ** -0.5
    lse = torch.logsumexp(x @ x.transpose(-2, -1) * scale, dim=-1)  # of whole rows, from the forward pass
    delta = (d_out * naive_attention(x, x, x)).sum(dim=-1)
    chunks = [x.chunk(P, 2), d_out.chunk(P, 2), lse.chunk(P, 2), delta.chunk(P, 2)]
    hands = [InHand(rank, [], torch.zeros_like(kv), torch.zeros_like(kv)) for rank, kv in enumerate(chunks[0])]
    record = []
    for _ in range(P):
        for rank, hand in enumerate(hands):
            kv, (q, *of_rows) = chunks[0][hand.block], (chunk[rank] for chunk in chunks)
            _, d_k, d_v = block_backward(q, kv, kv, *of_rows, scale)
            hands[rank] = InHand(hand.block, [*hand.added, rank], hand.d_k + d_k, hand.d_v + d_v)
        record.append(hands)
        if len(record) == 1:  # what a rank finds for its own block stays
            own, hands = hands, [InHand(it.block, [], 0 * it.d_k, 0 * it.d_v) for it in hands]
        hands = hands[-1:] + hands[:-1]  # the hop: rank r + 1 gets what rank r had
    both = zip(hands, own, strict=True)
    return [*record, [InHand(a.block, [*a.added, *b.added], a.d_k + b.d_k, a.d_v + b.d_v) for a, b in both]]


def _cell(ax: Axes, x: float, y: float, hand: InHand, off: float, *, home: bool) -> None:
    """The block above, its gradients below: who has added to them, and how far dK still is from autograd's."""
    width, height = CELL
    shapes.box(ax, x, y, width, height, fc=shapes.tint(hand.block))
    drawing.write(ax, x + 8, y + 50, "dK dV", size=drawing.SMALL)
    if home:
        drawing.write(ax, x + width / 2, y + 20, f"dK{hand.block}  dV{hand.block}", size=17, weight="bold", ha="center")
    else:
        shapes.block(ax, x, y, width, 34, hand.block, f"K{hand.block}  V{hand.block}", size=17, weight="bold")
    for rank in range(P):
        left = x + width - 5 - (P - rank) * SLOT
        there = rank in hand.added
        look = {"fc": drawing.colour(hand.block)} if there else {"fc": drawing.PAGE, "ec": drawing.FAINT, "lw": 1}
        shapes.box(ax, left, y + 40, SLOT - 3, 20, **look)
        ink = ink_on(drawing.colour(hand.block)) if there else drawing.MUTED
        drawing.write(ax, left + (SLOT - 3) / 2, y + 50, f"{rank}", size=drawing.SMALL, color=ink, ha="center")
    drawing.write(ax, x + width / 2, y + 76, f"dK off by {off:.3f}", size=drawing.SMALL, ha="center")


def draw() -> drawing.Picture:
    """Four rounds by four ranks, and a fifth row: home. In round t rank r holds K/V block (r minus t) mod 4. What it
    finds for its own block in round 0 stays. The dK and dV that travel have the shares of one rank in round 1, of two
    in round 2 and of three in round 3. The first hop carries K and V only, the next two K, V, dK and dV, the last dK
    and dV only: home, to rank r, where its own share is added. The error of a dK is zero there, and not before.
    """
    record = travel()
    exact = problem()[2][1].chunk(P, 2)
    title = f"The backward pass: dK and dV follow their block from round 1 on; hop {P} brings them home"
    key = "Small boxes: ranks whose queries are in dK and dV so far.   off by: largest error against autograd"
    figure, ax = shapes.headed(776, draw, title, {66: key})
    for rank in range(P):
        drawing.write(ax, LEFT + STEP[0] * rank + CELL[0] / 2, TOP - 20, f"rank {rank}", weight="bold", ha="center")
    for t, hands in enumerate(record):
        y, home = TOP + STEP[1] * t, t == P
        drawing.write(ax, 20, y + 36, "home" if home else f"round {t}", weight="bold")
        drawing.write(
            ax, 20, y + 57, "j = r" if home else f"j = (r − {t}) mod {P}", size=drawing.SMALL, color=drawing.MUTED
        )
        for rank, hand in enumerate(hands):
            x = LEFT + STEP[0] * rank
            off = (hand.d_k - exact[hand.block]).abs().max().item()
            _cell(ax, x, y, hand, off, home=home)
            if home:
                continue
            (x0, y0), (dx, dy) = (x + CELL[0] / 2, y + CELL[1] + 3), (STEP[0], STEP[1] - CELL[1] - 6)
            last = t == P - 1
            look = {"color": drawing.colour(hand.block), "lw": 2 if last else 5, "mutation_scale": 18}
            if rank < P - 1:
                shapes.arrow(ax, (x0, y0), (x0 + dx, y0 + dy), **look)
            else:  # out on the right, in again on the left
                shapes.arrow(ax, (x0, y0), (x0 + dx / 2, y0 + dy / 2), **{**look, "arrowstyle": "-"})
                x0 -= P * STEP[0]
                shapes.arrow(ax, (x0 + dx / 2, y0 + dy / 2), (x0 + dx, y0 + dy), **look)
        if not home:
            middle = y + (STEP[1] + CELL[1]) / 2
            drawing.write(ax, 878, middle - 10, f"hop {t + 1}", weight="bold")
            what = {0: "K, V only", P - 1: "dK, dV only"}.get(t, "K, V, dK, dV")
            drawing.write(ax, 878, middle + 11, what, color=drawing.MUTED)
    return figure

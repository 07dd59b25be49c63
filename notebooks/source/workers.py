"""What the notebooks run on other processes: a function defined in a notebook cell cannot be sent to one."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import trainable_ring
from bench.memory import kept_bytes
from ring_attn import ring_attention
from ringlab.basics.ranks import gather, scatter
from ringlab.models.transformer import TEXT, Config, Transformer, shard_text, summed_loss
from ringlab.ring import backward, flash_ring
from ringlab.states import state_ring
from ringlab.support import timeline
from ringlab.support.processes import RankContext


def whole_ring(context: RankContext, x: Tensor) -> Tensor | None:
    """Self-attention of x (B, H, S, D) on the ring; rank 0 returns the whole result."""
    chunk = scatter(x if context.rank == 0 else None, context)
    return gather(ring_attention(chunk, chunk, chunk), context)


def all_ranks_send_first(context: RankContext, x: Tensor) -> Tensor:
    rank, world_size = context.rank, context.world_size
    received = torch.empty_like(x)
    dist.send(x, (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    return received


def ring_gradients(context: RankContext, x: Tensor, d_out: Tensor, dtypes: list[torch.dtype]) -> list[dict[str, Any]]:
    """Self-attention of x (B, H, S, D) on the ring and its gradients, once in each dtype.

    Each result has "out", "dq", "dk" and "dv", whole on rank 0 and None elsewhere, and the bytes that this rank sent in
    each round: "sent forward" and "sent backward".
    """

    def sent(events: list[timeline.Event]) -> list[int]:
        mine = [event for event in events if (event.what, event.rank) == ("send", context.rank)]
        return [sum(event.bytes for event in mine if event.round == t) for t in sorted({event.round for event in mine})]

    results = []
    for dtype in dtypes:
        whole = (x.to(dtype), d_out.to(dtype)) if context.rank == 0 else (None, None)
        q, k, v = (scatter(whole[0], context).requires_grad_() for _ in "qkv")
        d_out_chunk = scatter(whole[1], context)
        with timeline.record(k.detach(), ring=ring_attention) as forward:
            out = backward.ring_attention(q, k, v)
        with timeline.record(k.detach()) as back:
            out.backward(d_out_chunk)
        tensors = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        result = {name: gather(tensor, context) for name, tensor in tensors.items()}
        results.append({**result, "sent forward": sent(forward), "sent backward": sent(back)})
    return results


def training_step(context: RankContext) -> tuple[float, dict[str, Tensor]]:
    """This rank's share of the loss of a small transformer in the zigzag layout, and of its weights' gradients."""
    torch.manual_seed(0)
    attention = partial(flash_ring.scaled_dot_product_attention, layout="zigzag")
    model = Transformer(Config(layers=1), attention).double()
    tokens, labels, at = shard_text(TEXT, "zigzag", context.rank, context.world_size)
    loss = summed_loss(model(tokens, at), labels) / (TEXT.numel() - len(TEXT))  # the tokens of the whole batch
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def model_steps(
    context: RankContext, text: Tensor, weights: dict[str, Tensor], configs: list[Config]
) -> list[tuple[float, dict[str, Tensor], int, int]]:
    """A training step in the zigzag layout of a model of each config.

    Each result has the loss and the gradients, summed over the ranks; what the first layer keeps on this rank, in
    bytes; and the hops of this rank in a layer.
    """
    ring = partial(flash_ring.scaled_dot_product_attention, layout="zigzag")
    tokens, labels, at = shard_text(text, "zigzag", context.rank, context.world_size)
    steps = []
    for config in configs:
        model = Transformer(config, ring).double()
        model.load_state_dict(weights)
        layer, x = model.layers[0], model.embedding(tokens)
        kept = kept_bytes(layer, partial(layer, x, at))
        with mock.patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as hop:
            loss = summed_loss(model(tokens, at), labels) / text[:, 1:].numel()
            loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        steps.append((total.item(), gradients, kept, hop.call_count // config.layers))
    return steps


def ring_of_states(context: RankContext, whole: list[Tensor], forgets: bool) -> list[Tensor]:
    """This rank's chunks of out and of five gradients; `forgets` drops the gradient of the state between ranks."""
    *inputs, d_out = (x.tensor_split(context.world_size, dim=2)[context.rank] for x in whole)
    inputs = [x.requires_grad_() for x in inputs]

    def drop(ctx: Any, *d_states: Tensor) -> tuple[Tensor | None, ...]:
        ctx.way = lambda maps, chain, h, group: [h] * len(maps)  # zeros: nothing comes from later ranks
        return right(ctx, *d_states)

    right = state_ring.HandOn.backward
    with mock.patch.object(state_ring.HandOn, "backward", staticmethod(drop if forgets else right)):
        out, _ = state_ring.ring_linear_attention(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def changed_rings(context: RankContext, changes: list[tuple[str, str]], layout: str = "zigzag") -> list[list[float]]:
    """trainable_ring.py with each of these changes: how far this rank's out, dq, dk and dv are off, in norm.

    Causal, 4 query heads on 2, 8 tokens a rank, float64. Against full attention.
    """
    P, S = context.world_size, 8 * context.world_size
    q, d_out = torch.randn(2, 1, 4, S, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, 1, 2, S, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    at = trainable_ring.positions(layout, S, context.rank, P)

    def results(attention: Any, *whole: Tensor) -> list[Tensor]:
        *leaves, d_out = (x.clone().requires_grad_() for x in whole)
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    exact = results(
        partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True), q, k, v, d_out
    )
    right, off = [x[:, :, at] for x in exact], []
    for old, new in changes:
        text = Path(trainable_ring.__file__).read_text()
        assert text.count(old) == 1, old
        names: dict[str, Any] = {"__name__": "changed"}
        exec(text.replace(old, new), names)
        ring = partial(names["ring_attention"], causal=True, layout=layout)
        mine = results(ring, *(x[:, :, at] for x in (q, k, v, d_out)))
        off.append([float((a - b).norm() / b.norm()) for a, b in zip(mine, right, strict=True)])
    return off

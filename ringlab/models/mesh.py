"""FSDP × ring: a mesh of dp × cp ranks. Each ring shares out its sequences, all ranks together share out the weights.

    rank = dp_index · cp + cp_index        a ring: cp ranks, one after the other        weights: 1 / (dp · cp) a rank

DDP and fully_shard average gradients, because each rank of theirs has a batch of its own. The ranks of a ring have
parts of one loss, and parts must be summed. So a summed loss gives every gradient at 1 / (dp · cp) of the right one,
without a warning. A mean over each rank's own labels is wrong too, when ranks hold different numbers of labels.
The rule:

    loss of a rank  =  sum over its labels  /  number of labels on all ranks  ·  number of ranks averaged over

Shapes: a batch is text (B, S + 1). A rank has tokens and labels (B / dp, C), C = S / cp, at positions (C,).

    $ python -m ringlab.models.mesh
    2 x 2 ranks, dp x cp, float64: the norm of the gradient as a multiple of the right one, and its error
    off   DDP: sum / count: x 0.2500, error 7.5e-01
    off   fully_shard: sum / count: x 0.2500, error 7.5e-01
    off   fully_shard: mean over the rank's own labels: x 1.0634, error 4.9e-01
    ok    fully_shard: sum / count · 4: x 1.0000, error 2.3e-16
    ok    tp x cp, fully_shard over cp: sum / count · 2: x 1.0000, error 2.4e-16

Before: transformer.py, the model. After: train.py, a run with it.
Source: Liu et al. 2024, appendix A (FSDP × ring); Zhao et al. 2023 (PyTorch FSDP), section 3.2; Shoeybi et al. 2019
(Megatron-LM), section 3 (tensor parallelism).
"""

import logging
import sys
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ringlab.models.transformer import IGNORED, Config, Transformer, shard_text, summed_loss
from ringlab.ring.flash_ring import scaled_dot_product_attention
from ringlab.ring.layouts import Layout, LayoutName, layout_of
from ringlab.ring.schedule import Ring, Schedule
from ringlab.support.agreement import agree, check_mesh, members
from ringlab.support.expect import expect
from ringlab.support.processes import RankContext, launch


def build_mesh(dp: int, cp: int, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of dp x cp ranks, its dimensions named "dp" and "cp", and the same ranks in one line, for the weights.

    The ranks of a ring are neighbours, so that a ring stays inside a host where it fits.
    Raises ValueError when the job does not have dp · cp ranks.
    """
    P = dist.get_world_size()
    expect(dp * cp == P, f"dp · cp is {dp} · {cp} on {P} process(es)", "as many processes")
    line = init_device_mesh(device_type, (dp * cp,), mesh_dim_names=("fsdp",))
    return init_device_mesh(device_type, (dp, cp), mesh_dim_names=("dp", "cp")), line


def shard_weights(model: Transformer, line: DeviceMesh, precision: MixedPrecisionPolicy | None = None) -> None:
    """Leave this rank its slice of each weight. A layer's weights are gathered when it computes, and freed after it.

    `precision` says in which dtype layers compute and gradients are summed (None: in that of the weights).
    """
    for module in (*model.layers, model):
        fully_shard(module, mesh=line, mp_policy=precision or MixedPrecisionPolicy())


def share_heads(model: Transformer, tp: DeviceMesh) -> None:
    """Tensor parallelism: leave this rank its share of the heads, and of the inner width of the feedforward.

    The ring does not change: it sends the K/V heads that are here. Raises ValueError when tp does not divide kv_heads,
    and for linear layers.
    """
    split = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), ColwiseParallel())
    summed = dict.fromkeys(("wo", "w2"), RowwiseParallel())
    G, linear, P = model.config.kv_heads, model.config.linear, tp.size()
    expect(G % P == 0, f"kv_heads is {G} for tp = {P}", "a multiple of tp")
    expect(linear == 0, f"linear is {linear}", "0: tp shares out no heads of linear layers")
    for layer in model.layers:
        parallelize_module(layer, tp, {**split, **summed})


def batch_loss(logits: Tensor, labels: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of the mean loss of the batch, scaled for the average over `group` (None: the whole job).

    logits (B, C, vocab), labels (B, C). `group` are the ranks that share the batch, over which FSDP averages. The
    average of the parts is the mean over all labels of the batch, and the average of their gradients its gradient.
    """
    count = (labels != IGNORED).sum()
    dist.all_reduce(count, group=group)
    return summed_loss(logits, labels) / count.clamp(min=1) * dist.get_world_size(group)


@dataclass(frozen=True)
class ContextParallel:
    """Which ranks share a text, and how: give it once, in place of a mesh or group, a layout and a way.

    `way` is the class of a schedule: the ring, or another of ringlab/ways. DoubleRing and Hybrid take a mesh of
    two dimensions, whose rank host · g + i is rank host · g + i of the ring.
    """

    mesh_or_group: DeviceMesh | ProcessGroup | None = None
    layout: LayoutName | Layout = "zigzag"
    way: type[Schedule] = Ring

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and the number of ranks, P."""
        where = self.mesh_or_group
        if isinstance(where, DeviceMesh):
            check_mesh(where, ndim=where.ndim)
            return where.mesh.flatten().tolist().index(dist.get_rank()), where.size()
        return members(where)


MeshOrGroup = ContextParallel | DeviceMesh | ProcessGroup | None
AnyLayout = LayoutName | Layout
Way = type[Schedule]


def placed(given: MeshOrGroup, layout: AnyLayout, way: Way = Ring) -> ContextParallel:
    """All in one, where a mesh of one dimension is its group. Raises ValueError for unknown ones, and for two.

    Every rank calls it, and all raise if one does.
    """
    one = given if isinstance(given, ContextParallel) else ContextParallel(given, layout, way)
    where = one.mesh_or_group
    if isinstance(where, DeviceMesh) and where.ndim == 1:
        where = where.get_group()

    def check() -> None:
        once = layout in ("zigzag", one.layout) and way in (Ring, one.way)
        expect(once, f"layout is {layout}, way is {way}, and {one}", "the layout and the way in one place")
        known = isinstance(one.way, type) and issubclass(one.way, Schedule)
        expect(known, f"way is {one.way!r}", "the class of a way, such as AllGather")
        layout_of(one.layout)

    agree(check, where)
    return replace(one, mesh_or_group=where)


CONFIG = Config(vocab=128, layers=1, hidden=32, heads=4, kv_heads=2, feedforward=48)
TEXT = torch.tensor([list(line) for line in (b"Keys and values go round a ring. ", b"A short line.".ljust(33, b"\0"))])


def _model(mesh: DeviceMesh | None = None) -> Transformer:
    torch.manual_seed(0)
    if mesh is None:
        return Transformer(CONFIG).double()
    ring = partial(scaled_dot_product_attention, layout="zigzag", group=mesh["cp"].get_group())
    return Transformer(CONFIG, ring).double()


def _real(labels: Tensor) -> Tensor:
    return labels.masked_fill(labels == 0, IGNORED)  # byte 0 is padding


def _fsdp(model: Transformer, line: DeviceMesh) -> nn.Module:
    shard_weights(model, line)
    return model


def _unscaled(logits: Tensor, labels: Tensor) -> Tensor:
    return batch_loss(logits, labels) / dist.get_world_size()


def _own_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return summed_loss(logits, labels) / (labels != IGNORED).sum()


CASES = (
    ("DDP: sum / count", lambda model, line: DistributedDataParallel(model), _unscaled),
    ("fully_shard: sum / count", _fsdp, _unscaled),
    ("fully_shard: mean over the rank's own labels", _fsdp, _own_mean),
    ("fully_shard: sum / count · 4", _fsdp, batch_loss),
)
TENSOR_PARALLEL = "tp x cp, fully_shard over cp: sum / count · 2"


def every_case(context: RankContext) -> list[tuple[str, float, float]]:
    """(case, norm of its gradient / the right norm, relative error) for each case, on each of 4 ranks."""
    tokens, labels, at = shard_text(TEXT, "zigzag", 0, 1)
    model = _model()
    loss_of_all = _own_mean(model(tokens, at), _real(labels))
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(loss_of_all, list(model.parameters()))])

    def row(name: str, model: nn.Module) -> tuple[str, float, float]:
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        gradient = torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients])
        return name, (gradient.norm() / exact.norm()).item(), ((gradient - exact).norm() / exact.norm()).item()

    mesh, line = build_mesh(2, 2, context.device.type)
    rows = []
    mine = TEXT.chunk(2)[mesh["dp"].get_local_rank()]
    tokens, labels, at = shard_text(mine, "zigzag", mesh["cp"].get_local_rank(), 2)
    for name, wrap, loss in CASES:
        wrapped = wrap(_model(mesh), line)
        loss(wrapped(tokens, at), _real(labels)).backward()
        rows.append(row(name, wrapped))

    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # gathering two shares is slow
    mesh = init_device_mesh(context.device.type, (2, 2), mesh_dim_names=("cp", "tp"))
    tokens, labels, at = shard_text(TEXT, "zigzag", mesh["cp"].get_local_rank(), 2)
    model = _model(mesh)
    share_heads(model, mesh["tp"])
    shard_weights(model, mesh["cp"])
    batch_loss(model(tokens, at), _real(labels), mesh["cp"].get_group()).backward()
    rows.append(row(TENSOR_PARALLEL, model))
    return rows


def main() -> int:
    rows = launch(every_case, 4)[0]
    print("2 x 2 ranks, dp x cp, float64: the norm of the gradient as a multiple of the right one, and its error")
    ok = True
    for name, ratio, error in rows:
        right = error < 1e-10
        print(f"{'ok   ' if right else 'off  '} {name}: x {ratio:.4f}, error {error:.1e}")
        ok &= right == (name in (TENSOR_PARALLEL, CASES[3][0]))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

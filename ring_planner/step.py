"""A step of training, or a prefill: what is computed, what travels, and how long each takes.

    products     2 · tokens · weights FLOPs; forward, once more if recomputed, twice backward (once, of frozen weights)
    attention    one pass forward, again if all is recomputed, one backward: seconds.py
    passes       norms, rotary, silu, casts to FP8, the loss, the optimizer: bytes / memory_bandwidth
    messages     of tensor parallelism, exposed; of FSDP, where they take longer than a layer's computing
    a prefill    products, attention and passes forward; two all-reduces of all rows in each layer

Shapes: numbers only. A replica of cp · tp GPUs has `batch` sequences of S tokens, so a GPU has batch · S / (cp · tp)
tokens. tp GPUs, of a host or of whole hosts, share heads, feedforward, tokens (sequence parallel) and vocabulary. cp of
these groups share a sequence by a way of ways.py. All GPUs but those of tp share parameters, gradients and the
optimizer's moments (FSDP). Experts are not spread: FSDP gathers all of a layer. Pipelines are not modelled.

A reader may skip this file: `ring-plan` shows the terms of a step. Before: seconds.py. After: memory.py.
Source: torchtitan (arXiv 2410.06511); Yang et al. 2024 (arXiv 2411.01783), prefill; Zhao et al. 2023 (FSDP).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd

from ring_planner.hidden_communication import AttentionLayer
from ring_planner.known import Known
from ring_planner.presets import GPU, Model
from ring_planner.round_costs import FRAMEWORK, HOST_LATENCY, HOST_SHARE, LATENCY, MEMORY_SHARE, realistic
from ring_planner.seconds import Pass, pass_of
from ring_planner.ways import Cluster

W = 2  # bytes of an activation and of a gathered weight: bf16
F32 = 4
# The share of the peak that matrix products reach. Fitted on the six times of published.json that need it, one step and
# five prefills, by a small mean of |error|; all are of Hopper GPUs. The mean is flat: 3.6 % here, 3.0 % at 0.8 and 0.5.
# Ampere's is not fitted: Megatron's whole steps reach 56 % of the peak (arXiv 2205.05198, table 5); products: more.
# Blackwell's is not fitted either, and no step on it is graded: Megatron's steps on B200 want 0.42, others want more.
# Chip and framework are one factor here; a step of yours tells them: --known.
MATMUL = {"bf16": 0.65, "fp8": 0.5}
AMPERE = 0.7
# Bytes a parameter: float32 master weights, and moments (adam-bf16: two of 16 bits, no master weights).
OPTIMIZERS = {"adam": 12, "adam8bit": 6, "adam-bf16": 4, "sgd": 4, "none": 0}
# Bytes of memory traffic a parameter: states read and written, norm.
MOVED = {"adam": 40, "adam8bit": 28, "adam-bf16": 16, "sgd": 24, "none": 0}
# Times as many bytes do passes move that no compiler has fused: counted from transformers' Llama. A norm in float32
# reads and writes 36 bytes of a number in place of 4, a rotary 22 in place of 8, silu and the product 10 in place of 6.
EAGER = 3.2
CAST = 5  # bytes of a number: read for its maximum, read and written as FP8
LOSS = 42  # bytes of a logit: written, cast, read twice for log-softmax, and three tensors of gradients
RECOMPUTE = {"none": 0.0, "selective": 0.5, "full": 1.0}  # the share of a layer's products that is computed again
TASKS, LOSSES = ("train", "prefill"), ("whole", "pieces")
# The year of FRAMEWORK by which attention among cp GPUs takes longer than these kernels say; a framework has the best.
KERNELS: dict[str, int | None] = {"fa2": 2024, "cudnn": 2026, "framework": 2024, "best": None}


@dataclass(frozen=True)
class Step:
    """A training step or a prefill. Raises ValueError for one that cannot be shared so; it says what to give.

    recompute: "full", a layer keeps its input; "selective", also attention's output and every other product (as
    torchtitan); "none". `trainable`: the share of the parameters that is trained, below 1 with LoRA.
    """

    model: Model
    gpu: GPU
    hosts: int
    per_host: int
    seq_len: int
    batch: int = 1
    cp: int = 1
    tp: int = 1
    recompute: str = "full"
    linear_dtype: str = "bf16"
    way: str = "all-gather"
    split: int | None = None
    kernels: str = "best"
    ours: bool = True  # our ways, or published ones: see `Pass`
    eager: bool = True  # no compiler has fused the passes
    task: str = "train"
    loss: str = "whole"
    optimizer: str = "adam"
    trainable: float = 1.0
    known: Known | None = None  # what measured steps say of the terms
    latents: bool = False  # a ring of latents, of a model that has them

    def __post_init__(self) -> None:
        names = ("recompute", "linear_dtype", "kernels", "task", "loss", "optimizer")
        kernels = [name for name in KERNELS if name in (*self.gpu.attention, "framework", "best")]
        choices: list[Collection[str]] = [RECOMPUTE, self.gpu.peak, kernels, TASKS, LOSSES, OPTIMIZERS]
        for name, known in zip(names, choices, strict=True):
            if getattr(self, name) not in known:
                on = f" on {self.gpu.name}" if name in ("linear_dtype", "kernels") else ""
                raise ValueError(f"{name} is {getattr(self, name)!r}{on}; expected one of {', '.join(known)}")
        if min(self.hosts, self.per_host, self.seq_len, self.batch, self.cp, self.tp) < 1:
            raise ValueError(f"the step is {self}; expected hosts, per_host, seq_len, batch, cp and tp of 1 or more")
        if not can_share(model := self.model, self.per_host, self.tp):
            given = f"tp is {self.tp}, GPUs of a host {self.per_host}, heads {model.heads} on {model.kv_heads}"
            of = "heads and feedforward, and to divide K/V heads and a host's GPUs or be a multiple of them"
            raise ValueError(f"{given}, feedforward {model.feedforward}; expected tp to divide {of}")
        if self.gpus % (self.cp * self.tp):
            raise ValueError(f"cp x tp is {self.cp} x {self.tp}; expected a divisor of {self.gpus} GPUs")
        if self.seq_len < self.cp * self.tp:
            raise ValueError(f"seq_len is {self.seq_len}; expected cp x tp = {self.cp * self.tp} tokens or more")

    @property
    def gpus(self) -> int:
        return self.hosts * self.per_host

    @property
    def tokens(self) -> float:
        """C, the tokens of a GPU."""
        return self.batch * self.seq_len / (self.cp * self.tp)

    @property
    def year(self) -> int | None:
        """That of FRAMEWORK, by which attention takes longer; None: as long as the kernels say."""
        # A framework's is fitted on rings; in an all-to-all there is one call, and no round.
        year = 2026 if self.way == "all-to-all" and self.kernels == "framework" else KERNELS[self.kernels]
        return None if self.cp == 1 or self.gpu.own else year

    @property
    def way_of_cp(self) -> tuple[str, int | None]:
        """The way among cp GPUs, and hybrid's split. A GPU alone is a ring of 1."""
        return (self.way, self.split) if self.cp > 1 else ("ring", None)

    @cached_property
    def share(self) -> AttentionLayer:
        """The attention of a layer that a GPU of tp has; K/V heads are copied where tp has more GPUs."""
        model, heads = self.model, self.model.heads // self.tp
        share = AttentionLayer(heads, max(1, model.kv_heads // self.tp), model.head_dim, W)
        its = model.latents if self.latents else None
        return replace(share, latents=its.sent, made=2 * its.rank * heads * (its.key + its.value)) if its else share

    @property
    def ring(self) -> Cluster:
        """The cluster that one GPU of each tp group sees: cp GPUs that share a sequence."""
        return cluster_of(self.gpu, self.kernels, self.model.head_dim, self.per_host, self.cp, self.tp)


@lru_cache(maxsize=1024)  # steps that differ elsewhere share a ring
def cluster_of(gpu: GPU, kernels: str, head_dim: int, per_host: int, cp: int, tp: int) -> Cluster:
    """See `Step.ring`. A host's NICs are shared by all its rings: of several GPUs of tp, or of several sequences."""
    inside, (forward, backward) = gcd(cp, max(1, per_host // tp)), gpu.rates(kernels, head_dim)
    nics = min(gpu.nics or per_host, inside)
    rates = forward, gpu.bandwidth, inside / nics * gpu.host_bandwidth, nics, gpu.memory_bandwidth
    ring = Cluster(cp // inside, inside, *rates, backward_flops=backward, multiprocessors=gpu.multiprocessors)
    return ring if gpu.ideal else realistic(ring, gpu.host_share, gpu.bandwidth_share)


def can_share(model: Model, per_host: int, tp: int) -> bool:
    """Can tp GPUs share heads and feedforward, as Megatron asks? K/V heads may be copied; tp is of whole hosts."""
    cut = any(each % tp for each in (model.heads, model.feedforward, model.dense_feedforward))
    return not cut and not any(max(each, tp) % min(each, tp) for each in (model.kv_heads, per_host))


def matmul_share(gpu: GPU, dtype: str) -> float:
    """The share of the peak that matrix products of a dtype reach."""
    if gpu.ideal:
        return 1.0
    return MATMUL[dtype] if "fp8" in gpu.peak else AMPERE


def matmul_seconds(gpu: GPU, flops: float, dtype: str) -> float:
    """Seconds of matrix products of a dtype."""
    return flops / (matmul_share(gpu, dtype) * gpu.peak[dtype])


def memory_rate(gpu: GPU) -> float:
    """Bytes/s of a pass over the memory."""
    return MEMORY_SHARE * gpu.memory_bandwidth


def attention_seconds(step: Step) -> tuple[float, float]:
    """Seconds of a layer's attention, forward and backward: the mean of all layers. Linear layers: state_ring.py."""
    way, split = step.way_of_cp
    times = step.batch * (FRAMEWORK[step.year] if step.year else 1.0)
    work = Pass(step.ring, step.share, step.seq_len / step.cp, mask="causal", ours=step.ours)  # in zigzag
    forward, backward = (times * pass_of(way, replace(work, backward=each), split) for each in (False, True))
    if (linear := step.model.linear) is None:
        return forward, backward
    product = matmul_seconds(step.gpu, step.tokens * linear.flops, "bf16")
    changes = linear.state + linear.heads * linear.key_dim**2  # what a rank's chunk does to the state, gathered by all
    size, share = step.cp * step.batch * F32 * changes / step.tp, linear.layers / step.model.layers
    message = collective_seconds(step, size, step.cp, step.ring.per_host)
    both = (forward, product + message), (backward, 2 * product + message)
    forward, backward = ((1 - share) * softmax + share * of_linear for softmax, of_linear in both)
    return forward, backward


def collective_seconds(step: Step, size: float, ranks: int, inside: int) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in all, among `ranks`; a host has `inside` or all.

    In rings through all NICs of these ranks.
    """
    if ranks == 1:
        return 0.0
    gpu, travel, inside = step.gpu, (ranks - 1) / ranks * size, min(inside, ranks)
    known = gpu.bandwidth_share, HOST_SHARE, LATENCY, HOST_LATENCY
    share, host_share, near, far = (1.0, 1.0, 0.0, 0.0) if gpu.ideal else known
    seconds = travel / (share * gpu.bandwidth) if inside > 1 else 0.0
    if ranks > inside:
        seconds = max(seconds, travel / (inside * host_share * gpu.host_bandwidth))
    return seconds + near * (ranks - ranks // inside) + far * (ranks // inside - 1)


def layer_numbers(model: Model) -> float:
    """Numbers of a token that a layer's forward pass reads and writes between its products, where they are fused.

    Norm: 2h; rotary of q and k: twice each; residual and norm: 4h; silu and product: 3F; residual: 3h. Linear: the
    convolution reads and writes, the gate reads out and itself and writes.
    """
    softmax = 2 * (model.heads + model.kv_heads) * model.head_dim * model.softmax_layers
    linear = model.linear.layers * (2 * model.linear.channels + 3 * model.linear.values) if model.linear else 0
    return 9 * model.hidden + (softmax + linear) / model.layers + 3 * model.inner


def cast_numbers(model: Model) -> tuple[int, int]:
    """Numbers of a token that go into a layer's products, and that come out: both are cast to FP8."""
    h, q = model.hidden, model.heads * model.head_dim
    return 2 * h + q + model.inner, 2 * h + q + 2 * model.kv_heads * model.head_dim + 2 * model.inner


def layer_passes(step: Step) -> tuple[float, float]:
    """Seconds of a layer's forward and backward passes over memory."""
    into, out = cast_numbers(step.model) if step.linear_dtype == "fp8" else (0, 0)
    moved = W * (EAGER if step.eager else 1.0) * layer_numbers(step.model)
    forward, backward = moved + CAST * into, 2 * moved + CAST * out
    rate = memory_rate(step.gpu) / step.tokens
    return forward / rate, backward / rate


def step_seconds(step: Step) -> dict[str, float]:
    """Seconds of each term of a step or a prefill; their sum is its time."""
    terms = prefill_seconds(step) if step.task == "prefill" else training_seconds(step)
    return step.known.corrected(terms) if step.known else terms


def training_seconds(step: Step) -> dict[str, float]:
    """Seconds of each term of a training step."""
    model, gpu, again, C = step.model, step.gpu, RECOMPUTE[step.recompute], step.tokens
    L, forward_again, trained = model.layers, float(step.recompute == "full"), step.trainable
    product = matmul_seconds(gpu, 2 * C * model.matrices, step.linear_dtype) / L
    forward, backward = attention_seconds(step)
    passes, passes_back = layer_passes(step)
    passes_again = passes if again > 0 else 0.0
    # A layer: gather and scatter of an all-reduce, for attention and for the feedforward; the same backward.
    exchange = 4 * collective_seconds(step, W * C * step.tp * model.hidden, step.tp, step.per_host)
    ahead = product + forward + passes + exchange
    back = (1 + trained + again) * product + forward_again * forward + backward + passes_back + exchange
    back += passes_again + forward_again * exchange
    gathered, scattered = fsdp_seconds(step)
    loss = LOSS * C * model.vocab / memory_rate(gpu)
    moments = trained * MOVED[step.optimizer] * model.parameters() / step.gpus / memory_rate(gpu)
    return {
        "products": L * (2 + trained + again) * product,
        "attention": L * ((1 + forward_again) * forward + backward),
        "head": matmul_seconds(gpu, (4 + 2 * trained) * C * model.hidden * model.vocab, "bf16"),
        "passes": L * (passes + passes_again + passes_back) + loss + moments,
        "tensor parallel": L * (2 + forward_again) * exchange,
        "FSDP": gathered + L * (max(0.0, gathered - ahead) + max(0.0, gathered + trained * scattered - back)),
    }


def prefill_seconds(step: Step) -> dict[str, float]:
    """Seconds of each term of a prefill: a forward pass, with logits of the last token only.

    `linear_dtype` is that of the feedforward. Every GPU of tp normalises all rows of its group.
    """
    model, gpu = step.model, step.gpu
    L, rows = model.layers, step.tokens * step.tp
    products = matmul_seconds(gpu, 2 * step.tokens * model.projections, "bf16")
    products += matmul_seconds(gpu, 2 * step.tokens * model.feedforwards(active=True), step.linear_dtype)
    inside = layer_numbers(model) - 9 * model.hidden
    cast = CAST * (model.hidden + model.inner / step.tp) if step.linear_dtype == "fp8" else 0
    moved = W * (EAGER if step.eager else 1.0) * (9 * model.hidden + inside / step.tp) + cast
    all_reduce = 2 * collective_seconds(step, W * rows * model.hidden, step.tp, step.per_host)
    return {
        "products": products,
        "attention": L * attention_seconds(step)[0],
        "passes": L * rows * moved / memory_rate(gpu),
        "tensor parallel": L * 2 * all_reduce,
    }


def fsdp_seconds(step: Step) -> tuple[float, float]:
    """Seconds to gather a layer's weights in bf16, and to sum its gradients in float32."""
    ranks = step.gpus // step.tp
    weights = (step.model.parameters() - step.model.outside) / step.model.layers / step.tp
    inside = max(1, step.per_host // step.tp)
    gathered = collective_seconds(step, W * weights, ranks, inside)
    return gathered, collective_seconds(step, F32 * weights, ranks, inside)

"""A whole training step: what attention leaves out takes most of the time, and the vocabulary most of the memory.

    products     2 · tokens · weights FLOPs; forward, once more if recomputed, twice backward; in FP8 only the layers'
    attention    one pass forward, again if all is recomputed, one backward: two_speeds.py
    passes       norms, rotary, silu, casts to FP8, the loss, Adam: bytes / memory_bandwidth
    messages     of tensor parallelism, exposed; of FSDP, where they take longer than a layer's computing

    memory = state + gathered weights + what all layers keep + max(the loss, the last layer at work)
    the loss keeps 3 float32 numbers for each token and word, and the bf16 logits: 14 bytes · tokens · vocabulary

Shapes: numbers only. A replica of cp · tp GPUs has `batch` sequences of S tokens, so a GPU has batch · S / (cp · tp)
tokens. tp GPUs, of a host or of whole hosts, share heads, feedforward, tokens (sequence parallel) and vocabulary. cp of
these groups share a sequence by a way of ways.py. All GPUs but those of tp share parameters, gradients and Adam's
moments (FSDP). Experts are not spread: FSDP gathers all of a layer. Pipelines are not modelled.

    $ python -m ringlab.planning.whole_step
    Llama 3.1 8B, 8 H100 of 500 W, 32,768 tokens a GPU, all recomputed, FP8 layers: seconds of a step
        products 2.29, attention 4.94, head 0.20, passes 0.72, tensor parallel 0.00, FSDP 0.00
    GiB of a GPU
        state 15.0, gathered 5.1, activations 8.0, loss 55.5
    ok    a step                      4,019.56 tokens/s a GPU, measured 3,890: within 15%
    ok    a step                         83.64 GiB, measured 83.9: within 10%

Before: ranking.py, of attention alone. After: prefill.py, the same without a backward pass.
Source: torchtitan, benchmarks/llama3_h100_202412 (arXiv 2410.06511), a measured step; Korthikanti et al. 2022 (arXiv
2205.05198), selective recomputation, sequence parallel; Zhao et al. 2023 (FSDP); ringlab/planning/step_memory.py.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd
from pathlib import Path
from typing import Any

from ringlab.planning.hidden_communication import AttentionLayer
from ringlab.planning.presets import GIB, GPU, GPUS, Model, gpu_named, model_named
from ringlab.planning.ring_memory import STATE
from ringlab.planning.round_costs import CARD_SHARE, HOST_LATENCY, LATENCY, LINK_SHARE, MEMORY_SHARE, realistic
from ringlab.planning.step_memory import kept_at_the_loss, kept_at_work
from ringlab.planning.two_speeds import simulate
from ringlab.planning.ways import Cluster, training_bytes

W = 2  # bytes of an activation and of a gathered weight: bf16
F32 = 4
# The share of the peak that matrix products reach. Fitted on the six times of published.json that need it, one step and
# five prefills, by a small mean of |error|; all are of Hopper GPUs. The mean is flat: 3.6 % here, 3.0 % at 0.8 and 0.5.
# Fitted on the prefills alone, 0.55 and 0.6, the step is off by 8 %. Steps that were not fitted: published_later.json.
# Ampere's is not fitted: Megatron's whole steps reach 56 % of the peak (arXiv 2205.05198, table 5); products: more.
MATMUL = {"bf16": 0.65, "fp8": 0.5}
AMPERE = 0.7
ADAM = 40  # bytes of memory traffic a parameter: read and write of three float32, the gradient, its norm, the clipping
CAST = 5  # bytes of a number: read for its maximum, read and written as FP8
LOSS = 42  # bytes of a logit: written, cast, read twice for log-softmax, and three tensors of gradients
RECOMPUTE = {"none": 0.0, "selective": 0.5, "full": 1.0}  # the share of a layer's products that is computed again


@dataclass(frozen=True)
class Step:
    """A training step. Raises ValueError for one that cannot be shared so; the message says what to give.

    recompute: "full", a layer keeps its input; "selective", also attention's output and every other product (as
    torchtitan); "none". `kernel`: "torch" or "fused" of the GPU's attention kernels.
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
    way: str = "all-gather"  # torch's context_parallel
    split: int | None = None
    kernel: str = "fused"
    machine: Cluster | None = None  # measured: what attention and messages cost; then `gpu` has its link and card

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {self.recompute!r}; expected {', '.join(RECOMPUTE)}")
        if self.linear_dtype not in self.gpu.peak:
            given = f"linear_dtype is {self.linear_dtype!r} on {self.gpu.name}"
            raise ValueError(f"{given}; expected {', '.join(self.gpu.peak)}")
        if self.kernel not in self.gpu.attention:
            raise ValueError(f"kernel is {self.kernel!r}; expected {', '.join(self.gpu.attention)}")
        if min(self.hosts, self.per_host, self.seq_len, self.batch, self.cp, self.tp) < 1:
            raise ValueError(f"the step is {self}; expected hosts, per_host, seq_len, batch, cp and tp of 1 or more")
        if max(self.per_host, self.tp) % min(self.per_host, self.tp) or self.model.heads % self.tp:
            given = f"tp is {self.tp}, GPUs of a host {self.per_host}, query heads {self.model.heads}"
            raise ValueError(f"{given}; expected tp to divide the heads, and to divide a host's GPUs or be a multiple")
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
    def way_of_cp(self) -> tuple[str, int | None]:
        """The way among cp GPUs, and hybrid's split. A GPU alone is a ring of 1."""
        return (self.way, self.split) if self.cp > 1 else ("ring", None)

    @cached_property
    def share(self) -> AttentionLayer:
        """The attention of a layer that a GPU of tp has; K/V heads are copied where tp has more GPUs."""
        layer = self.model.attention(W)
        return replace(layer, heads=layer.heads // self.tp, kv_heads=max(1, layer.kv_heads // self.tp))

    @cached_property
    def ring(self) -> Cluster:
        """The cluster that one GPU of each tp group sees: cp GPUs that share a sequence."""
        inside, gpu = gcd(self.cp, max(1, self.per_host // self.tp)), self.gpu
        hosts = self.cp // inside
        if self.machine:
            nics = min(self.machine.nics, inside)
            # A host's NICs are shared by all its rings: of several GPUs of tp, or of several sequences.
            mine = self.machine.nics * inside / self.machine.per_host / nics
            return replace(
                self.machine,
                hosts=hosts,
                per_host=inside,
                nics=nics,
                host_bandwidth=min(1.0, mine) * self.machine.host_bandwidth,
            )
        forward, backward = gpu.attention[self.kernel]
        nominal = Cluster(hosts, inside, forward, gpu.link, gpu.card, memory_bandwidth=gpu.memory_bandwidth)
        nominal = replace(nominal, backward_flops=backward, multiprocessors=gpu.multiprocessors)
        return realistic(nominal, gpu.card_share)


def matmul_seconds(gpu: GPU, flops: float, dtype: str) -> float:
    """Seconds of matrix products of a dtype."""
    share = AMPERE if "fp8" not in gpu.peak else MATMUL[dtype]
    return flops / (share * gpu.peak[dtype])


def memory_rate(gpu: GPU) -> float:
    """Bytes/s of a pass over the memory."""
    return MEMORY_SHARE * gpu.memory_bandwidth


@lru_cache(maxsize=4096)
def simulated(way: str, ring: Cluster, share: AttentionLayer, chunk: float, backward: bool, split: int | None) -> float:
    """`simulate`, once for equal arguments: steps that differ elsewhere share it."""
    return simulate(way, ring, share, chunk, backward=backward, split=split, mask="causal")


def attention_seconds(step: Step) -> tuple[float, float]:
    """Seconds of a layer's attention, forward and backward, simulated; causal, zigzag."""
    way, split = step.way_of_cp
    forward, backward = (
        step.batch * simulated(way, step.ring, step.share, step.seq_len / step.cp, each, split)
        for each in (False, True)
    )
    return forward, backward


def collective_seconds(step: Step, size: float, ranks: int, inside: int) -> float:
    """Seconds of an all-gather or a reduce-scatter of `size` bytes in all, among `ranks`; a host has `inside` or all.

    In rings through all NICs of these ranks, as `collect` of two_speeds.py.
    """
    if ranks == 1:
        return 0.0
    link, card, near, far = LINK_SHARE * step.gpu.link, CARD_SHARE * step.gpu.card, LATENCY, HOST_LATENCY
    if step.machine:  # measured: the GPU's numbers are what its wires reach
        link, card, near, far = step.gpu.link, step.gpu.card, step.machine.latency, step.machine.host_latency
    travel, inside = (ranks - 1) / ranks * size, min(inside, ranks)
    seconds = travel / link if inside > 1 else 0.0
    if ranks > inside:
        seconds = max(seconds, travel / (inside * card))
    return seconds + near * (ranks - ranks // inside) + far * (ranks // inside - 1)


def layer_numbers(model: Model) -> float:
    """Numbers of a token that a layer's forward pass reads and writes between its products, fused by a compiler.

    Norm: 2h; rotary of q and k: twice each; residual and norm: 4h; silu and product: 3F; residual: 3h.
    """
    return 9 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * model.inner


def cast_numbers(model: Model) -> tuple[int, int]:
    """Numbers of a token that go into a layer's products, and that come out: both are cast to FP8."""
    h, q = model.hidden, model.heads * model.head_dim
    return 2 * h + q + model.inner, 2 * h + q + 2 * model.kv_heads * model.head_dim + 2 * model.inner


def pass_seconds(step: Step) -> dict[str, float]:
    """Seconds of a layer's forward and backward passes over memory: "forward", "backward"."""
    into, out = cast_numbers(step.model) if step.linear_dtype == "fp8" else (0, 0)
    forward = W * layer_numbers(step.model) + CAST * into
    backward = 2 * W * layer_numbers(step.model) + CAST * out
    rate = memory_rate(step.gpu) / step.tokens
    return {"forward": forward / rate, "backward": backward / rate}


def step_seconds(step: Step) -> dict[str, float]:
    """Seconds of each term of a step; their sum is the step."""
    model, gpu, again, C = step.model, step.gpu, RECOMPUTE[step.recompute], step.tokens
    L, forward_again = model.layers, float(step.recompute == "full")
    product = matmul_seconds(gpu, 2 * C * model.matrices, step.linear_dtype) / L
    forward, backward = attention_seconds(step)
    passes = pass_seconds(step)
    # A layer: gather and scatter of an all-reduce, for attention and for the feedforward; the same backward.
    exchange = 4 * collective_seconds(step, W * C * step.tp * model.hidden, step.tp, step.per_host)
    ahead = product + forward + passes["forward"] + exchange
    back = (2 + again) * product + forward_again * forward + backward + passes["backward"] + exchange
    back += (again > 0) * passes["forward"] + forward_again * exchange
    gathered, scattered = fsdp_seconds(step)
    loss = LOSS * C * model.vocab / memory_rate(gpu)
    adam = ADAM * model.parameters() / step.gpus / memory_rate(gpu)
    return {
        "products": L * (3 + again) * product,
        "attention": L * ((1 + forward_again) * forward + backward),
        "head": matmul_seconds(gpu, 6 * C * model.hidden * model.vocab, "bf16"),
        "passes": L * ((1 + (again > 0)) * passes["forward"] + passes["backward"]) + loss + adam,
        "tensor parallel": L * (2 + forward_again) * exchange,
        "FSDP": gathered + L * (max(0.0, gathered - ahead) + max(0.0, gathered + scattered - back)),
    }


def fsdp_seconds(step: Step) -> tuple[float, float]:
    """Seconds to gather a layer's weights in bf16, and to sum its gradients in float32."""
    ranks = step.gpus // step.tp
    weights = (step.model.parameters() - step.model.outside) / step.model.layers / step.tp
    inside = max(1, step.per_host // step.tp)
    return (
        collective_seconds(step, W * weights, ranks, inside),
        collective_seconds(step, F32 * weights, ranks, inside),
    )


def kept_numbers(step: Step) -> int:
    """Numbers of a token that a layer keeps until its backward pass."""
    model, layer = step.model, step.model.attention(W)
    h, q = model.hidden, model.heads * model.head_dim
    return {
        "full": h,
        # x; q and v, every other product; out and lse; the gate; the output
        "selective": 2 * h + 2 * q + model.kv_heads * model.head_dim + model.heads + model.inner,
        "none": 2 * h + sum(kept_at_work(layer, h, model.inner)),
    }[step.recompute]


def layer_at_work(step: Step) -> float:
    """Bytes of the last layer in its backward pass: in the feedforward, or in attention."""
    model, C = step.model, step.tokens
    attention, feedforward = kept_at_work(model.attention(W), model.hidden, model.inner)
    again = attention + feedforward if step.recompute != "none" else 0
    of_feedforward = again + 3 * model.inner + model.hidden  # and its gradients
    way, split = step.way_of_cp
    of_attention = training_bytes(way, step.share, step.seq_len / step.cp, step.ring, split=split) * step.batch
    whole = 3 * step.tp * model.hidden if step.tp > 1 else 0  # n of all tokens of tp, twice; its gradient
    return W * C * whole + max(W * C * of_feedforward, W * C * again + of_attention)


def step_bytes(step: Step) -> dict[str, float]:
    """Bytes of a GPU at the peak of a step, by what they hold: their sum is the peak."""
    model, C, tp = step.model, step.tokens, step.tp
    layer = (model.parameters() - model.outside) / model.layers
    rows, words = kept_at_the_loss(model.hidden, model.vocab)
    # tp: gathered rows and their gradient; torch's loss_parallel has one float32 more. The bf16 logits stay reserved.
    loss = W * rows + F32 * words + W * model.vocab + (2 * W * tp * model.hidden + F32 * model.vocab) * (tp > 1)
    return {
        "state": STATE * model.parameters() / step.gpus,
        "gathered": W * (3 * layer + 2 * model.outside) / tp,  # weights and gradients; the next layer's weights
        "activations": W * C * model.layers * kept_numbers(step),
        "loss": max(C * loss, layer_at_work(step)),
    }


def said(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the words of a row's source say, where the row has no field for it."""
    text, words = str(row.get("source", "")), dict[str, Any]()
    if found := re.search(r"prefill of ([\d,]+) tokens", text):
        words["seq_len"] = int(found[1].replace(",", ""))
    if found := re.search(r"([\d.]+) GB/s a card", text):
        words["card"] = 1e9 * float(found[1])
    if re.search(r"fp8|float8", text, re.IGNORECASE):
        words["linear_dtype"] = "fp8"
    if re.search(r"torchtitan llama3_h100_202412|2411\.01783", text):
        words["gpu"] = "h100-500w"
    else:
        gpus = [name for name in GPUS if re.search(rf"\b{name}\b", text, re.IGNORECASE)]
        words |= {"gpu": gpus[0]} if gpus else {}
    return words


def gpu_of(row: Mapping[str, Any]) -> GPU:
    """The GPU of a row: named by it or by its source, H100 if neither; its numbers where the row has them."""
    given = {**said(row), **row}
    name, machine = str(given.get("gpu") or "h100").lower(), str(said(row).get("gpu", ""))
    gpu = gpu_named(machine if machine.startswith(name) else name)  # "H100" of a known machine is that machine's
    named = {"link": "link", "card": "card", "hbm": "memory_bandwidth"}
    gpu = replace(gpu, **{ours: given[theirs] for theirs, ours in named.items() if given.get(theirs)})
    forward, backward = row.get("forward_flops"), row.get("backward_flops")
    if forward:
        gpu = replace(gpu, attention=dict.fromkeys(gpu.attention, (forward, backward or forward)))
    return gpu


def check_counts(row: Mapping[str, Any]) -> None:
    """Raises ValueError for a number of a row that is no whole number of 1 or more, and for words that are none."""
    for name in ("hosts", "per_host", "seq_len", "batch", "cp", "tp", "inside"):
        if row.get(name) is not None and (type(row[name]) is not int or not 1 <= row[name] <= 1e12):
            raise ValueError(f"{name} is {row[name]!r}; expected a whole number of 1 or more, up to 1e12")
    for name in ("source", "model", "gpu", "recompute", "linear_dtype", "way", "kernel"):
        if not isinstance(row.get(name, ""), str | None):
            raise ValueError(f"{name} is {row[name]!r}; expected words")
    if row.get("pp") not in (None, 1):
        raise ValueError(f"pp is {row['pp']!r}; expected 1: the stages of a pipeline are not modelled")


def step_of(row: Mapping[str, Any]) -> Step:
    """The Step of a row of "steps" in published.json. Raises ValueError for a field that it lacks.

    What a row may leave out: batch 1, cp 1, tp 1, no recomputation, products in bf16 (or FP8, if the words of its
    source say so), all-gather among cp, torch's attention kernel, an H100.
    """
    missing = [name for name in ("model", "hosts", "per_host", "seq_len") if not row.get(name)]
    if missing:
        raise ValueError(f"the row has no {', '.join(missing)}; add it: it says what was measured")
    check_counts(row)
    given = {"recompute": "none", "kernel": "torch", **said(row), **row}
    names = ("hosts", "per_host", "seq_len", "batch", "cp", "tp", "recompute", "linear_dtype", "way", "kernel")
    options = {name: given[name] for name in names if given.get(name) is not None}
    options["recompute"] = {"layers": "selective", "all": "full"}.get(given["recompute"], given["recompute"] or "none")
    if options.get("way") == "hybrid":
        options["split"] = given.get("inside")
    return Step(model_named(str(row["model"])), gpu_of(row), **options)


def predict_step(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with predicted_tokens_s_a_gpu and predicted_peak_gib. Raises ValueError as `step_of` and `Step`."""
    step = step_of(row)
    speed = step.tokens / sum(step_seconds(step).values())
    return {**row, "predicted_tokens_s_a_gpu": speed, "predicted_peak_gib": sum(step_bytes(step).values()) / GIB}


def published(section: str) -> list[dict[str, Any]]:
    """The rows of "attention", "steps" or "serving" in published.json: measured by others."""
    return list(json.loads(Path(__file__).with_name("published.json").read_text())[section])


def as_measured(name: str, unit: str, predicted: float, measured: float, within: float) -> bool:
    """Print a prediction beside what was measured. Returns whether it is as near as it should be."""
    right = abs(predicted / measured - 1) <= within
    numbers = f"{predicted:10,.2f} {unit}, measured {measured:,}: within {within:.0%}"
    print(f"{'ok   ' if right else 'WRONG'} {name:<26}{numbers}")
    return right


def main() -> int:
    (row,) = map(predict_step, published("steps"))
    step = step_of(row)
    print("Llama 3.1 8B, 8 H100 of 500 W, 32,768 tokens a GPU, all recomputed, FP8 layers: seconds of a step")
    print("   ", ", ".join(f"{name} {seconds:.2f}" for name, seconds in step_seconds(step).items()))
    print("GiB of a GPU")
    print("   ", ", ".join(f"{name} {size / GIB:.1f}" for name, size in step_bytes(step).items()))
    ok = True
    for what, unit, within in (("tokens_s_a_gpu", "tokens/s a GPU", 0.15), ("peak_gib", "GiB", 0.10)):
        ok &= as_measured("a step", unit, row[f"predicted_{what}"], row[f"measured_{what}"], within)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

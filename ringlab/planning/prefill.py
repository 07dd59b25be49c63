"""Serving a long context: how long until the first token, when hosts share the prompt in a ring?

    products    2 · tokens · weights FLOPs: projections in bf16, the feedforward in FP8
    exchange    two all-reduces of all rows in every layer, inside a host, exposed
    attention   a ring between the hosts: two_speeds.py
    a hop       latency + bytes / rate

Shapes: numbers only. A host is a group of tp GPUs that share heads and feedforward, and have all rows of the host's
tokens; cp hosts share the S tokens, S / cp each, and pass K and V on. The GPUs at one place of all hosts form a ring.

    $ python -m ringlab.planning.prefill
    Llama 3 405B, 128,000 tokens, hosts of 8 H100: seconds to the first token; a hop between hosts
    ok    cp 1                           42.40 s, measured 42.01: within 12%
    ok    cp 2                           21.72 s, measured 21.042: within 12%
    ok    cp 4                           11.28 s, measured 10.95: within 12%
    ok    cp 8                            6.09 s, measured 5.85: within 12%
    ok    cp 16                           3.53 s, measured 3.8: within 12%
    ok    message pass-KV, 32,000 tokens    628.80 us, measured 629: within 12%
    ok    message pass-Q, 800 tokens    165.90 us, measured 166: within 12%
    ok    message pass-Q, 3,200 tokens    513.25 us, measured 544: within 12%

Before: whole_step.py, a step in training. After: cost_model.py, answers for your own cluster.
Source: Yang et al. 2024 (arXiv 2411.01783v3), tables 5 and 7, measured; its FP8 feedforward: section 4.
"""

import sys
from collections.abc import Mapping
from typing import Any

from ringlab.planning.presets import GPU, model_named
from ringlab.planning.round_costs import HOST_LATENCY
from ringlab.planning.whole_step import (
    CAST,
    Step,
    W,
    as_measured,
    attention_seconds,
    check_counts,
    collective_seconds,
    gpu_of,
    layer_numbers,
    matmul_seconds,
    memory_rate,
    published,
    said,
)


def prefill_seconds(step: Step) -> dict[str, float]:
    """Seconds of each term of a prefill: a forward pass, with logits of the last token only.

    `step` says how it is shared; `linear_dtype` is that of the feedforward. Without sequence parallelism every GPU
    of tp normalises all rows of its host.
    """
    model, gpu = step.model, step.gpu
    L, rows = model.layers, step.tokens * step.tp
    shared = model.feedforwards(active=True)
    products = matmul_seconds(gpu, 2 * step.tokens * L * model.projections, "bf16")
    products += matmul_seconds(gpu, 2 * step.tokens * shared, step.linear_dtype)
    inside = layer_numbers(model) - 9 * model.hidden
    cast = CAST * (model.hidden + model.inner / step.tp) if step.linear_dtype == "fp8" else 0
    moved = W * (9 * model.hidden + inside / step.tp) + cast
    all_reduce = 2 * collective_seconds(step, W * rows * model.hidden, step.tp, step.per_host)
    return {
        "products": products,
        "attention": L * attention_seconds(step)[0],
        "passes": L * rows * moved / memory_rate(gpu),
        "tensor parallel": L * 2 * all_reduce,
    }


def message_seconds(size: float, gpu: GPU) -> float:
    """Seconds of a hop of `size` bytes to another host, through the NIC of a GPU."""
    return HOST_LATENCY + size / (gpu.card_share * gpu.card)


def said_by_paper(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row; its source is the paper above if the row has none, or says "same"."""
    return {**row, "source": row["source"] if len(row.get("source") or "") > len("same") else "arXiv 2411.01783"}


def serving_step(row: Mapping[str, Any]) -> Step:
    """The Step of a row of "serving" in published.json: Llama 3 405B and 128,000 tokens, unless it says otherwise."""
    given: dict[str, Any] = {"model": "llama-3.1-405b", "seq_len": 128_000, "per_host": 8, "tp": 8}
    given |= {"linear_dtype": "fp8", **said(row), **row}
    if not row.get("cp"):
        raise ValueError("the row has no cp and no megabytes; add one: hosts that share a prompt, or a message's size")
    hosts = -(-given["cp"] * given["tp"] // given["per_host"])
    return Step(
        model_named(given["model"]),
        gpu_of(said_by_paper(row)),
        hosts,
        given["per_host"],
        given["seq_len"],
        given.get("batch") or 1,
        given["cp"],
        given["tp"],
        linear_dtype=given["linear_dtype"],
        way=given.get("way") or "ring",
        kernel=given.get("kernel") or "fused",
    )


def predict_serving(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with predicted_s; with predicted_us if it is a message. Raises ValueError as `serving_step`."""
    check_counts(row)
    size = row.get("megabytes")
    if size is not None:
        if type(size) not in (int, float) or not 0 < size <= 1e9:
            raise ValueError(f"megabytes is {size!r}; expected a number above 0")
        gpu = gpu_of(said_by_paper(row))
        return {**row, "predicted_us": 1e6 * message_seconds(1e6 * size, gpu)}
    return {**row, "predicted_s": sum(prefill_seconds(serving_step(row)).values())}


WITHIN = 0.12  # of the measured time


def main() -> int:
    ok = True
    print("Llama 3 405B, 128,000 tokens, hosts of 8 H100: seconds to the first token; a hop between hosts")
    for row in map(predict_serving, published("serving")):
        name, unit = ("message", "us") if "message" in row else ("cp", "s")
        ok &= as_measured(f"{name} {row[name]}", unit, row[f"predicted_{unit}"], row[f"measured_{unit}"], WITHIN)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

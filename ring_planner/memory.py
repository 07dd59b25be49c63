"""The memory of a GPU, counted in one place: of attention alone, of a training step, and of a prefill.

    attention, forward    2·H + 4·G heads of C tokens    q, out, the K and V in hand and the next: 6·w·C·h, if G = H
    backward              4·H + 8·G, and H + 4·G in fp32 with all gradients: 22·w·C·h in bf16, if G = H
    a step      state + max(at the loss, in the last layer, in the first layer)
    state       2 bytes a parameter, and those of the optimizer for each that is trained; its gradient has 2 more
    at the loss         what all layers keep, the logits, and the gathered weights outside the layers; no gradient yet
    in the last layer   what all layers keep, a layer at work, its gathered weights and gradient, the next one's weights
    in the first layer  the same with what one layer keeps, and all gradients
    logits      14 bytes for each token and word: 3 float32 numbers and the bf16 logits. In pieces: of PIECE tokens
    a prefill   weights of a host / its GPUs + K and V of all attention layers + a layer at work

Each rank needs memory for its own chunk only, so P devices hold P times the sequence. Forward pass, paper's
accounting: one device with blockwise attention stores L + 1 chunks, a ring L + 6.

Shapes: h = H·D, C = S/P tokens on a rank, w bytes an element. Tests count the tensors of real rings, and what autograd
keeps; bench/memory.py measures a layer.

A reader may skip this file. Before: step.py. After: plan.py.
Source: Liu et al. 2024, section 3 and table 1; torchtitan's pages, eight steps; Korthikanti et al. 2022 (arXiv
2205.05198), selective recomputation.
"""

from ring_planner.hidden_communication import AttentionLayer, gradient_bytes
from ring_planner.presets import GIB
from ring_planner.step import F32, OPTIMIZERS, Step, W
from ring_planner.ways import Cluster, exchange_ranks, shares

PIECE = 2048  # tokens of the loss at once, where it is computed in pieces
CONTEXT = 1.5 * GIB  # bytes that CUDA and NCCL take for themselves: assumed
RESERVE = 0.073  # of what is counted, kept free: by so much ten published peaks are above their counts, at most


def peak_bytes(layer: AttentionLayer, chunk: float) -> float:
    """Peak memory of a rank in attention's forward pass, in bytes: q, out, the K and V in hand, and those that arrive.

    The paper's count (section 3). For a backward pass a rank keeps its own K and V too.
    """
    return (2 * layer.heads + 4 * layer.kv_heads) * chunk * layer.head_dim * layer.itemsize


def peak_bytes_backward(layer: AttentionLayer, chunk: float) -> float:
    """Peak memory of a rank of flash_ring.py in its backward pass, in bytes.

    q, k, v, out and the gradient of out; K and V in two buffers; dq, dk and dv of the block in hand. The sums are
    float32 at least: dQ, and dK and dV in two buffers. bench/memory.py measures it.
    """
    H, G = layer.heads, layer.kv_heads
    tensors, sums = (3 * H + 2 * G) + 4 * G + (H + 2 * G), H + 4 * G
    return (tensors * layer.itemsize + sums * max(layer.itemsize, 4)) * chunk * layer.head_dim


def training_bytes(
    way: str, layer: AttentionLayer, chunk: float, cluster: Cluster, *, split: int | None = None
) -> float:
    """Peak memory of a rank in attention's backward pass, in bytes. Raises ValueError as `exchange_ranks` does.

    The ring needs `peak_bytes_backward`. The double ring has two buffers more, for the hops between hosts. All-gather
    has three buffers for all S tokens, of one K/V head at a time. After an exchange a rank has g·C tokens of its share
    of the heads, and its own chunk of dO. All-to-all needs no buffers.
    """
    g = exchange_ranks(way, layer, cluster, split)
    D, w = layer.head_dim, layer.itemsize

    def two_buffers(heads: float, tokens: float) -> float:  # for K and V, and for their gradients
        return 2 * (2 * heads * tokens * D * w + 2 * heads * tokens * D * max(w, 4))

    buffers = two_buffers(layer.kv_heads, chunk)
    if way == "all-gather":
        return peak_bytes_backward(layer, chunk) - buffers + 3 / 2 * two_buffers(1, cluster.devices * chunk)
    if way == "double ring":
        return peak_bytes_backward(layer, chunk) + (buffers if cluster.hosts > 1 else 0)
    peaks = []
    for share in set(shares(layer, g)):
        peaks.append(peak_bytes_backward(share, g * chunk) + (layer.heads * chunk * D * w if g > 1 else 0))
        if way == "all-to-all":  # its sums stay in one place
            peaks[-1] += gradient_bytes(share, g * chunk) - two_buffers(share.kv_heads, g * chunk)
    return max(peaks)


def kept_at_work(layer: AttentionLayer, hidden: int, feedforward: int) -> tuple[int, int]:
    """Numbers of a token that fused attention keeps, and those that a gated feedforward keeps.

    Attention: x/rms, n; q, and out for W_o; k and v; cos and sin of q's and k's rotary; the kernel's out and lse. The
    feedforward: h/rms, n; the gate, silu of it, the other half, their product.
    """
    queries = layer.heads * layer.head_dim
    attention = 2 * hidden + 2 * queries + 2 * layer.kv_heads * layer.head_dim + 2 * layer.head_dim
    return attention + queries + layer.heads, 2 * hidden + 4 * feedforward


def kept_at_the_loss(hidden: int, vocab: int) -> tuple[int, int]:
    """Numbers of a token at the loss: last x, x/rms, n; and, always in float32, log-softmax and two gradients."""
    return 3 * hidden, 3 * vocab


def kept_numbers(step: Step) -> float:
    """Numbers of a token that a layer keeps until its backward pass: the mean of all layers."""
    model, layer, linear = step.model, step.model.attention(W), step.model.linear
    h, q = model.hidden, model.heads * model.head_dim
    if step.recompute == "full":
        return h
    attention, feedforward = kept_at_work(layer, h, model.inner)
    # selective: x; q and v, every other product; out and lse. Of the feedforward: the gate; the output
    softmax = {"selective": h + 2 * q + model.kv_heads * model.head_dim + model.heads, "none": 2 * h + attention}
    others = {"selective": h + model.inner, "none": feedforward}
    kept: float = softmax[step.recompute]
    if linear:
        # none: x and h, x/rms and n; what goes into the convolution, and comes out; the gate, out, gated out
        some, every = linear.channels + 2 * linear.values, 2 * linear.channels + 3 * linear.values + 2 * linear.heads
        of_linear = {"selective": h + some, "none": 4 * h + every}
        kept += (of_linear[step.recompute] - kept) * linear.layers / model.layers
    return kept + others[step.recompute]


def layer_at_work(step: Step) -> float:
    """Bytes of the last layer, of softmax attention, in its backward pass: in the feedforward, or in attention."""
    model, C = step.model, step.tokens
    attention, feedforward = kept_at_work(model.attention(W), model.hidden, model.inner)
    eager = 4 * model.hidden * step.eager  # two norms keep their input in float32
    again = attention + feedforward + eager if step.recompute != "none" else 0
    of_feedforward = again + 3 * model.inner + model.hidden  # and its gradients
    way, split = step.way_of_cp
    of_attention = training_bytes(way, step.share, step.seq_len / step.cp, step.ring, split=split) * step.batch
    whole = 3 * step.tp * model.hidden if step.tp > 1 else 0  # n of all tokens of tp, twice; its gradient
    return W * C * whole + max(W * C * of_feedforward, W * C * again + of_attention)


def loss_bytes(step: Step) -> float:
    """Bytes at the loss. With tp, torch's loss_parallel has two float32 more (one row of torchtitan shows it)."""
    model, C, tp = step.model, step.tokens, step.tp
    rows, words = kept_at_the_loss(model.hidden, model.vocab)
    at_once = C if step.loss == "whole" else min(C, PIECE)
    of_rows, of_words = W * rows, F32 * words + W * model.vocab
    if tp > 1:
        of_rows += 2 * W * tp * model.hidden  # gathered rows and their gradient
        of_words += 2 * F32 * model.vocab
    return C * of_rows + at_once * of_words


def step_bytes(step: Step) -> dict[str, float]:
    """Bytes of a GPU at the peak, by what they hold: their sum is the peak."""
    return prefill_bytes(step) if step.task == "prefill" else training_step_bytes(step)


def training_step_bytes(step: Step) -> dict[str, float]:
    """Bytes at the peak of a training step."""
    model, tp, trained, parameters = step.model, step.tp, step.trainable, step.model.parameters()
    layer, spread = (parameters - model.outside) / model.layers, step.gpus > tp
    outside = W * (spread * model.outside + trained * model.hidden * model.vocab) / tp  # and the gradient of the head
    whole = outside + W * (2 * spread + trained) * layer / tp
    gradients = W * trained * parameters / step.gpus
    kept, work = W * step.tokens * model.layers * kept_numbers(step), layer_at_work(step)
    moments = (  # gradients, gathered, activations, and what else
        (0.0, outside + W * spread * layer / tp, kept, loss_bytes(step), "loss"),  # the last layer's are kept
        (0.0, whole, kept, work, "a layer at work"),
        (gradients, whole, kept / model.layers, work, "a layer at work"),
    )
    *sizes, name = max(moments, key=lambda moment: sum(moment[:4]))
    weights = W * model.outside + W * layer * model.layers
    state = weights + trained * OPTIMIZERS[step.optimizer] * parameters
    return {"state": state / step.gpus, **dict(zip(("gradients", "gathered", "activations", name), sizes, strict=True))}


def prefill_bytes(step: Step) -> dict[str, float]:
    """Bytes of a prefill: every cp group has all weights, shared among its tp GPUs; FP8: one byte in feedforwards."""
    model, layer = step.model, step.share
    feedforward = model.feedforwards(active=False)
    weights = W * (model.parameters() - feedforward) + (1 if step.linear_dtype == "fp8" else W) * feedforward
    rows = step.tokens * step.tp  # all rows of the group are on each of its GPUs
    kv = 2 * layer.kv_heads * layer.head_dim
    at_work = 3 * model.hidden + 2 * layer.heads * layer.head_dim + 2 * kv + min(1.0, PIECE / rows) * 3 * model.inner
    states = F32 * model.linear.layers * model.linear.state / step.tp if model.linear else 0
    return {
        "weights": weights / step.tp,
        "K and V": W * rows * (model.latents.sent if model.latents else kv) * model.softmax_layers + states,
        "a layer at work": W * rows * at_work,
    }

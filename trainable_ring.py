"""Ring Attention that trains, in one file. Copy it: it needs PyTorch 2.6 or newer, and nothing else.

P ranks share S tokens. Each keeps its C = S/P queries; K and V go round. In round t rank r has block j = (r - t) mod P,
the K and V of rank j, and block j - 1 is on its way. In the backward pass the sums of dK and dV follow their block one
round later, and a rank's own block comes last. Either way P - 1 hops are enough. Source: Liu et al., arXiv 2310.01889.
    at = positions("zigzag", S, rank, P)  # this rank's tokens: to cut the sequence, and for rotary angles
    out = ring_attention(q, k, v, causal=True, layout="zigzag")  # its q and out (B, H, C, D), k and v (B, G, C, D)
"""

import torch
import torch.distributed as dist


def positions(layout, seq_len, rank, world_size):
    """Where the tokens of a rank stand in the sequence: int64 (C,)."""
    n = world_size * (2 if layout == "zigzag" else 1)  # pieces: in zigzag a rank has an early one and a late one
    if layout not in ("contiguous", "zigzag") or seq_len % n or not 0 <= rank < world_size:
        raise ValueError(f"{layout=}, {seq_len=}, {rank=}; expected contiguous or zigzag, {n}·i, 0 to {world_size - 1}")
    return torch.arange(seq_len).view(n, -1)[[rank, -1 - rank] if layout == "zigzag" else rank].flatten()


def visible(r, j, C, causal, layout):
    """What rank r computes of block j: which queries, which keys, and whether query i sees keys 0 to i of them only."""
    if not causal or j == r:
        return slice(C), slice(C), causal
    if layout == "zigzag":  # half a block on every rank in every round: nobody waits
        return (slice(C), slice(C // 2), False) if j < r else (slice(C // 2, C), slice(C), False)
    return slice(C if j < r else 0), slice(C), False  # contiguous: no query sees a later block


def scores(q, k, triangle):
    s = torch.einsum("bgnqd,bgkd->bgnqk", q, k) * q.shape[-1] ** -0.5  # N = H/G query heads share a K/V head
    return s.masked_fill(s.new_ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if triangle else s


def block_forward(q, k, v, triangle):
    """out and lse of one block. A fused kernel goes here: chapter 8a has one. It must skip an empty q."""
    s = scores(q, k, triangle)  # (B, G, N, Sq, Sk)
    return torch.einsum("bgnqk,bgkd->bgnqd", torch.softmax(s, dim=-1), v), torch.logsumexp(s, dim=-1)


def block_backward(q, k, v, triangle, d_out, out, lse):
    """dq, dk, dv of one block, with out and lse of whole rows (Dao et al. 2022). The kernel's backward goes here."""
    p = torch.exp(scores(q, k, triangle) - lse[..., None])  # (B, G, N, Sq, Sk): the softmax weights, recomputed
    ds = p * (torch.einsum("bgnqd,bgkd->bgnqk", d_out, v) - (d_out * out).sum(-1, True)) * q.shape[-1] ** -0.5
    dq, dk = torch.einsum("bgnqk,bgkd->bgnqd", ds, k), torch.einsum("bgnqk,bgnqd->bgkd", ds, q)
    return dq, dk, torch.einsum("bgnqk,bgnqd->bgkd", p, d_out)


def hop(x, group):
    """Begin to send x to the next rank. The function returned waits, and gives what the previous rank sent."""
    r, P, received = dist.get_rank(group), dist.get_world_size(group), torch.empty_like(x)
    both = [(dist.irecv, received, r - 1), (dist.isend, x, r + 1)]  # at once: ranks that all send first wait for ever
    works = dist.batch_isend_irecv([dist.P2POp(op, y, group=group, group_peer=peer % P) for op, y, peer in both])
    return lambda: [work.wait() for work in works] and received


def blocks(kv, group, dtype, own_last=False):
    """Yield j, and rank j's K and V in `dtype`, for all P blocks. While one is computed, the next is on its way."""
    r, P, own = dist.get_rank(group), dist.get_world_size(group), kv
    for t in range(P + own_last):  # own_last: the own block comes in round P, not in round 0
        arrive = hop(kv, group) if t < P - 1 else None  # after the last round nobody needs another block
        if t >= own_last:
            yield (r - t) % P, kv.to(dtype)
        kv = arrive() if arrive else own


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, layout, group):  # q (B, G, N, C, D), k and v (B, G, C, D)
        r, C, ctx.options = dist.get_rank(group), q.shape[-2], (causal, layout, group)
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for j, (k_j, v_j) in blocks(torch.stack((k, v)), group, q.dtype):  # the own block first: then no row is empty
            rows, keys, triangle = visible(r, j, C, causal, layout)
            out_j, lse_j = block_forward(q[..., rows, :], k_j[..., keys, :], v_j[..., keys, :], triangle)
            weight = torch.sigmoid(lse_j - lse[..., rows])[..., None]  # e^lse_j / (e^lse + e^lse_j)
            out[..., rows, :] = torch.lerp(out[..., rows, :], out_j, weight)  # averages merge, they do not add up
            lse[..., rows] = torch.logaddexp(lse[..., rows], lse_j)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        if torch.is_grad_enabled():  # once_differentiable would miss a loss that is linear in out
            raise RuntimeError("create_graph=True asks for a second derivative; a ring has a first one only")
        (q, k, v, out, lse), (causal, layout, group) = ctx.saved_tensors, ctx.options
        r, C, dq, arrive = dist.get_rank(group), q.shape[-2], torch.zeros_like(q), None
        for j, (k_j, v_j) in blocks(torch.stack((k, v)), group, q.dtype, own_last=True):
            rows, keys, triangle = visible(r, j, C, causal, layout)
            block = q[..., rows, :], k_j[..., keys, :], v_j[..., keys, :], triangle
            with torch.autocast(q.device.type, enabled=False):
                dq_j, *dkv_j = block_backward(*block, d_out[..., rows, :], out[..., rows, :], lse[..., rows])
            dq[..., rows, :] += dq_j
            dkv = arrive() if arrive else q.new_zeros(2, *k.shape)  # block j's sums came while this rank computed
            dkv[..., keys, :] += torch.stack(dkv_j)
            arrive = hop(dkv, group) if j != r else None  # to where block j is next; the own block is last: home
        return dq, *dkv.to(k.dtype), None, None, None


def ring_attention(q, k, v, causal=False, layout="contiguous", group=None):
    """q (B, H, C, D), k and v (B, G, C, D) -> out (B, H, C, D), this rank's rows of softmax(QKᵀ/√D)V of all tokens."""
    right = q.dim() == k.dim() == 4 and k.shape == v.shape == (len(q), k.shape[1], *q.shape[2:]) and q.numel() > 0
    right = right and k.numel() > 0 and q.shape[1] % k.shape[1] == 0 and q.dtype == k.dtype == v.dtype
    right = right and q.is_floating_point() and (layout == "contiguous" or (layout == "zigzag" and q.shape[2] % 2 == 0))
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))  # all have a backward pass, or none
    call = f"{[(*x.shape, x.dtype) for x in (q, k, v)]}, causal={bool(causal)}, {layout}, gradients={graph}"
    word = hash(tuple(call.encode()))  # a number that is alike on all ranks, as the hash of a text is not
    dist.all_reduce(both := torch.tensor([word, -word], device=q.device), dist.ReduceOp.MAX, group)  # a GPU waits
    if not right or sum(both) or dist.get_rank(group) < 0:
        wanted = "q (B, H, C, D), k and v (B, G, C, D) in one float dtype, G divides H, contiguous or zigzag of even C"
        wanted = "the same call on all ranks, and on no others" if right else wanted
        raise ValueError(f"expected {wanted}; this rank's call is {call}")
    wide = q.unflatten(1, (k.shape[1], -1)).to(torch.promote_types(q.dtype, torch.float32))  # K and V travel unchanged
    with torch.autocast(q.device.type, enabled=False):  # all is computed in float32: exact, but slow for 16 bits
        return Ring.apply(wide, k, v, causal, layout, group).flatten(1, 2).to(q.dtype)


def train(attention, at, S):  # the losses of a layer that must look back: tokens name the first one of their sequence
    torch.manual_seed(0)  # the same weights and sequences on every rank
    word, place, to_qkv = weights = [torch.randn(n, 32).double().div(4).requires_grad_() for n in (8, S, 64)]
    adam = torch.optim.Adam(weights, 0.03)
    for tokens in torch.randint(8, (31, 16, S)):
        qkv = ((word[tokens[:, at]] + place[at]) @ to_qkv.T).unflatten(2, (8, 8)).transpose(1, 2)  # (16, 8, C, 8)
        guess = attention(*qkv.split((4, 2, 2), dim=1)).sum(1)  # (16, C, 8): 4 heads, on 2, vote for a word
        loss = torch.nn.functional.cross_entropy(guess.mT, tokens[:, :1].expand(-1, len(at))) * len(at) / S
        adam.zero_grad()
        loss.backward()
        for x in (loss.detach(), *(weight.grad for weight in weights)) if len(at) < S else ():
            dist.all_reduce(x)  # a rank has its tokens' share of the loss, so its gradients are shares too
        adam.step()
        yield loss.item()


if __name__ == "__main__":  # trains a layer with the ring, and compares it with one process
    if dist.get_node_local_rank(-1) < 0:
        raise SystemExit("start it with torchrun --nproc_per_node=4 trainable_ring.py")
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")  # gloo sums `gpus`
    rank, P, gpu = dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()
    dist.all_reduce(gpus := torch.tensor(torch.cuda.device_count() - gpu), dist.ReduceOp.MIN)
    torch.cuda.set_device(gpu if gpus > 0 else -1)  # GPUs where every rank has one; -1 chooses none
    torch.set_default_device("cuda" if gpus > 0 else "cpu")
    S, sdpa = 16 * P, torch.nn.functional.scaled_dot_product_attention
    ring = list(train(lambda *qkv: ring_attention(*qkv, True, "zigzag"), positions("zigzag", S, rank, P), S))
    one = list(train(lambda *qkv: sdpa(*qkv, is_causal=True, enable_gqa=True), torch.arange(S), S))
    ok = max(abs(a - b) for a, b in zip(ring, one, strict=True)) < 1e-9 and ring[-1] < ring[0] / 2
    lines = [f"step {i:2}: loss of the ring {ring[i]:.9f}, of one process {one[i]:.9f}" for i in (0, 10, 20, 30)]
    if rank == 0:
        print(*lines, f"{'ok' if ok else 'WRONG'}, on {'GPUs' if gpus > 0 else 'CPUs'}", sep="\n")
    dist.destroy_process_group()
    raise SystemExit(0 if ok else 1)

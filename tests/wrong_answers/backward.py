"""Wrong answers to the exercises of chapter 5, and what each must be told."""

from notebooks.checks.backward import check_added_so_far, check_bytes_sent_back, check_softmax_backward

CHUNK = 32 * 131072 * 128  # numbers in K of a block, with 8 ranks and 2**20 tokens


def delta(out, d_out):
    return (out * d_out).sum(-1, keepdim=True)


WRONG_ANSWERS = [
    (check_softmax_backward, lambda W, dW, out, d_out: W * dW, "delta is missing"),
    (check_softmax_backward, lambda W, dW, out, d_out: dW - delta(out, d_out), "multiply by the weights"),
    (check_softmax_backward, lambda W, dW, out, d_out: W * (dW + delta(out, d_out)), "subtracted"),
    (check_softmax_backward, lambda W, dW, out, d_out: W * (dW - delta(W, dW)), "only the keys of this block"),
    (check_softmax_backward, lambda W, dW, out, d_out: W * (dW - (d_out * out).sum()), "one delta for all rows"),
    (check_softmax_backward, lambda W, dW, out, d_out: W * (dW - (d_out * out).sum(-1)), "ends in RuntimeError"),
    (check_softmax_backward, lambda W, dW, out, d_out: W, "off by up to"),
    (check_softmax_backward, lambda W, dW, out, d_out: None, "expected a tensor"),
    (check_added_so_far, lambda rank, t, P: {(rank + i) % P for i in range(t + 1)}, "the other way"),
    (check_added_so_far, lambda rank, t, P: {(rank - i) % P for i in range(1, t + 1)}, "has just computed"),
    (check_added_so_far, lambda rank, t, P: {rank - i for i in range(t + 1)}, "remainder by P"),
    (check_added_so_far, lambda rank, t, P: set(range(P)), "the block came from rank 3"),
    (check_added_so_far, lambda rank, t, P: rank, "not the kind of answer"),
    (check_bytes_sent_back, 7 * 4 * CHUNK, "forward pass"),
    (check_bytes_sent_back, 8 * 8 * CHUNK, "K and V travel too"),
    (check_bytes_sent_back, 7 * 12 * CHUNK, "one hop more"),
    (check_bytes_sent_back, 8 * 12 * CHUNK, "need not come home"),
    (check_bytes_sent_back, (7 + 8) * 4 * CHUNK, "kept in float32"),
    (check_bytes_sent_back, (7 + 8) * 8 * CHUNK, "2 bytes"),
    (check_bytes_sent_back, 46 * CHUNK, "count both"),
    (check_bytes_sent_back, 1, "7 hops of K and V"),
]

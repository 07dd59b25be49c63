"""Ring Attention by hand: 4 GPUs, 8 tokens, every number, in numpy and in one process.

    for t in rounds 0 ... 3:  GPU r holds block j = (r - t) mod 4, and for each of its tokens
        s = q K_jᵀ / √2    m' = max(m, max s)    p = e^(s-m')    f = e^(m-m')    l' = f l + Σ p    o' = f o + p V_j
    at the end:  out = o / l

Shapes: tokens (S, D) = (8, 2); Q, K and V are the tokens themselves (identity projections); a GPU has (C, D) = (2, 2).

    $ python worked_example.py
    ...
    ROUND 1  hop: each GPU has passed its block on to GPU r+1

      GPU 0 holds KV3 (tokens 6 and 7), received from GPU 3, where it started
        token |     s0     s1 |     p0     p1 |      f |      m      l |     o0     o1 | o/l so far
            0 |  2.121  2.121 |  1.000  1.000 |  0.243 |  2.121  2.363 |  6.243  4.120 |  2.642  1.744
    ...
    ok    the ring equals softmax(QK^T/sqrt(2))V of all 8 tokens
    ok    and torch's scaled_dot_product_attention in float64
          (rounding allows a difference of 3.7e-14)

This file needs only numpy, so you can copy it and use it alone.

Before: ringlab/basics/blockwise_attention.py. After: ringlab/basics/blocking_messages.py, then ring_attn.py, on real
processes.
Source: a published worked example (section 05 of a course on Ring Attention), recomputed; Liu et al. 2024, algorithm 1.
"""

import argparse
import math
import os
import signal
import sys
from dataclasses import dataclass

import numpy as np

TOKENS = np.array([[1, 0], [0, 1], [1, 1], [1, 2], [2, 1], [2, 2], [3, 1], [3, 3]], dtype=np.float64)
P = 4  # GPUs
C = len(TOKENS) // P  # tokens on each
BLOCK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of KV0 to KV3, here and in every picture


@dataclass(frozen=True)
class Step:
    """What one GPU computes in one round; the first axis is its C tokens. m, l and o are the values after the round."""

    block: int
    scores: np.ndarray  # (C, C), -inf where a causal mask hides the key
    p: np.ndarray  # (C, C), e^(scores - m)
    f: np.ndarray  # (C,), the factor on the old l and o
    m: np.ndarray  # (C,)
    l: np.ndarray  # (C,)
    o: np.ndarray  # (C, D)


def rows(chunk: int) -> np.ndarray:
    """The tokens (C, D) of one chunk: the queries of GPU `chunk`, and the keys and values of block `chunk`."""
    return TOKENS[C * chunk : C * (chunk + 1)]


def ring(causal: bool = False) -> list[list[Step]]:
    """Every number of the ring: steps[t][r] is what GPU r does in round t."""
    m, l, o = np.full((P, C), -np.inf), np.zeros((P, C)), np.zeros((P, C, 2))
    in_hand = list(range(P))  # the block that each GPU holds
    steps: list[list[Step]] = []
    for t in range(P):
        if t > 0:
            in_hand = in_hand[-1:] + in_hand[:-1]  # the hop: GPU r's block goes to GPU r+1
        steps.append([])
        for r in range(P):
            j = in_hand[r]
            s = rows(r) @ rows(j).T / math.sqrt(2)
            if causal:
                query_at, key_at = C * r + np.arange(C), C * j + np.arange(C)
                s[key_at > query_at[:, None]] = -np.inf
            m_new = np.maximum(m[r], s.max(axis=1))  # finite from round 0 on: every token sees itself
            p, f = np.exp(s - m_new[:, None]), np.exp(m[r] - m_new)
            m[r], l[r], o[r] = m_new, f * l[r] + p.sum(axis=1), f[:, None] * o[r] + p @ rows(j)
            steps[t].append(Step(j, s, p, f, m[r].copy(), l[r].copy(), o[r].copy()))
    return steps


def softmax(s: np.ndarray) -> np.ndarray:
    """softmax over the last axis, shifted by the max so that no exponential overflows."""
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def full_attention(causal: bool = False) -> np.ndarray:
    """softmax(Q Kᵀ / √2) V over all 8 tokens at once, (S, D): the right result, without a ring."""
    s = TOKENS @ TOKENS.T / math.sqrt(2)
    return softmax(np.where(np.tri(len(TOKENS), dtype=bool) | (not causal), s, -np.inf)) @ TOKENS


def rounding() -> float:
    """The largest difference that float64 rounding explains.

    A score s has an error of about eps·|s|, so each weight has a relative error of that size. It moves the result by
    that share of the largest value. The factor 4 covers the roundings of e^s, of the sums and of the rescaling.
    """
    largest_score = (TOKENS @ TOKENS.T).max() / math.sqrt(2)
    return float(4 * np.finfo(np.float64).eps * (1 + largest_score) * TOKENS.max())


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def paint(block: int, text: str) -> str:
    """`text` in the block's colour on a terminal; plain text anywhere else, and where NO_COLOR is set."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    red, green, blue = (int(BLOCK_COLOURS[block][i : i + 2], 16) for i in (1, 3, 5))
    return f"\033[1;38;2;{red};{green};{blue}m{text}\033[0m"


def numbers(values: np.ndarray, width: int = 7, digits: int = 3) -> str:
    """The values side by side; a hidden score shows as a dot."""
    return "".join(f"{'.':>{width}}" if v == -np.inf else f"{v:>{width}.{digits}f}" for v in np.atleast_1d(values))


def block_name(j: int) -> str:
    """The name of a block in its colour, and its tokens."""
    return paint(j, f"KV{j}") + f" (tokens {C * j} and {C * j + 1})"


def print_setup() -> None:
    """The tokens of each GPU, and the meaning of each printed column."""
    print("SETUP  8 tokens on 4 GPUs. Q = K = V = the tokens, D = 2, scores are divided by sqrt(2) = 1.414\n")
    for r in range(P):
        tokens = "   ".join(f"token {C * r + i} = [{x:.0f} {y:.0f}]" for i, (x, y) in enumerate(rows(r)))
        print(f"  GPU {r}   {tokens}   keeps these queries; its K/V block is {paint(r, f'KV{r}')}")
    print("""
  s = q.K/sqrt(2)     scores of this round's two keys        m  the largest score so far
  p = e^(s-m)         their weights, before division by l    l  the sum of all weights so far
  f = e^(old m-m)     brings the old l and o to the new m    o  the sum of weight times value so far
                      (0 at first, as m begins at -inf)      .  a score that the causal mask hides""")


def print_round(t: int, steps: list[Step], gpus: list[int], causal: bool) -> None:
    """One round of the given GPUs: the block that each holds, where it came from, and a line for each token."""
    hop = "each GPU holds its own block" if t == 0 else "hop: each GPU has passed its block on to GPU r+1"
    print(f"\nROUND {t}  {hop}")
    for r in gpus:
        step, sender, origin = steps[r], (r - 1) % P, ""
        if t > 0:
            start = ", where it started" if t == 1 else f"; it started on GPU {step.block}"
            origin = f", received from GPU {sender}{start}"
        print(f"\n  GPU {r} holds {block_name(step.block)}{origin}")
        if causal and step.block > r:
            print("    all of it lies in the future of this GPU's tokens: nothing to compute, m, l and o stay")
            continue
        print("    token |     s0     s1 |     p0     p1 |      f |      m      l |     o0     o1 | o/l so far")
        for i in range(C):
            state = f"{numbers(step.m[i])}{numbers(step.l[i])} |{numbers(step.o[i])} |{numbers(step.o[i] / step.l[i])}"
            scores = paint(step.block, f"{numbers(step.scores[i])} |{numbers(step.p[i])}")
            print(f"    {C * r + i:>5} |{scores} |{numbers(step.f[i])} |{state}")


def print_result(steps: list[list[Step]], gpus: list[int], causal: bool) -> bool:
    """The result of the given GPUs beside full attention, and whether all GPUs agree with it and with torch's."""
    ring_out = np.concatenate([step.o / step.l[:, None] for step in steps[-1]])
    full = full_attention(causal)
    print("\nRESULT  after all 4 rounds every GPU has met every block; it divides once: out = o / l\n")
    print("    token | out of the ring | full attention  | difference")
    for token in (C * r + i for r in gpus for i in range(C)):
        both = f"{numbers(ring_out[token], 8, 4)} |{numbers(full[token], 8, 4)}"
        print(f"    {token:>5} |{both} |{np.abs(ring_out[token] - full[token]).max():>8.0e}")
    ok = bool(np.abs(ring_out - full).max() <= rounding())
    print(f"\n{'ok   ' if ok else 'WRONG'} the ring equals {'causal ' * causal}softmax(QK^T/sqrt(2))V of all 8 tokens")
    try:
        import torch
    except ImportError:
        print("      (torch is not installed: not compared with its scaled_dot_product_attention)")
    else:
        x = torch.tensor(TOKENS)[None]
        sdpa = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)[0].numpy()
        agrees = bool(np.abs(ring_out - sdpa).max() <= rounding())
        print(f"{'ok   ' if agrees else 'WRONG'} and torch's scaled_dot_product_attention in float64")
        ok &= agrees
    print(f"      (rounding allows a difference of {rounding():.1e})")
    return ok


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ring Attention by hand: 4 GPUs, 8 tokens, every number.")
    parser.add_argument("--gpu", type=int, choices=range(P), help="only this GPU")
    parser.add_argument("--round", type=int, choices=range(P), help="only this round")
    parser.add_argument("--causal", action="store_true", help="a token sees itself and the tokens before it")
    args = parser.parse_args(argv)
    steps = ring(args.causal)
    gpus = list(range(P)) if args.gpu is None else [args.gpu]
    print_setup()
    for t in range(P) if args.round is None else [args.round]:
        print_round(t, steps[t], gpus, args.causal)
    return 0 if print_result(steps, gpus, args.causal) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # where nobody reads on, as after `| head`, it ends
    sys.exit(main())

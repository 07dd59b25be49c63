"""Ring Attention by hand: 4 GPUs, 8 tokens, every number, in numpy and in one process.

    for t in rounds 0 ... 3:  GPU r holds block j = (r - t) mod 4, and for each of its tokens
        s = q K_jᵀ / √2    m' = max(m, max s)    p = e^(s-m')    f = e^(m-m')    l' = f l + Σ p    o' = f o + p V_j
    at the end:  out = o / l

Shapes: tokens (S, D) = (8, 2); Q, K and V are the tokens themselves (identity projections); a GPU has (C, D) = (2, 2).

    $ python worked_example.py
    ...
    ROUND 1  hop: each GPU has passed its block on to GPU r+1

      GPU 0 holds KV3 (tokens 6 and 7), from GPU 3, where it was born
        token |     s0     s1 |     p0     p1 |      f |      m      l |     o0     o1 | o/l so far
            0 |  2.121  2.121 |  1.000  1.000 |  0.243 |  2.121  2.363 |  6.243  4.120 |  2.642  1.744
    ...
    ok    the ring equals softmax(QK^T/sqrt(2))V of all 8 tokens
    ok    and torch's scaled_dot_product_attention in float64

With --published it sets a published version of this example beside it, 3.731 and all, and says what went wrong there.

Before: basics/blockwise_attention.py. After: basics/blocking_messages.py, then ring_attn.py, on real processes.
Source: a published worked example (section 05 of a course on Ring Attention), recomputed; Liu et al. 2024, algorithm 1.
"""

import argparse
import math
import os
import sys
import textwrap
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
    steps = []
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
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def full_attention(causal: bool = False) -> np.ndarray:
    """softmax(Q Kᵀ / √2) V over all 8 tokens at once, (S, D): what the ring must arrive at."""
    s = TOKENS @ TOKENS.T / math.sqrt(2)
    return softmax(np.where(np.tri(len(TOKENS), dtype=bool) | (not causal), s, -np.inf)) @ TOKENS


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def paint(block: int, text: str) -> str:
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    red, green, blue = (int(BLOCK_COLOURS[block][i : i + 2], 16) for i in (1, 3, 5))
    return f"\033[1;38;2;{red};{green};{blue}m{text}\033[0m"


def numbers(values: np.ndarray, width: int = 7, digits: int = 3) -> str:
    """The values side by side; a hidden score shows as a dot."""
    return "".join(f"{'.':>{width}}" if v == -np.inf else f"{v:>{width}.{digits}f}" for v in np.atleast_1d(values))


def listed(values: np.ndarray) -> str:
    return "[" + " ".join(f"{v:.3f}" for v in values) + "]"


def block_name(j: int) -> str:
    return paint(j, f"KV{j}") + f" (tokens {C * j} and {C * j + 1})"


def print_setup() -> None:
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
    hop = "each GPU holds its own block" if t == 0 else "hop: each GPU has passed its block on to GPU r+1"
    print(f"\nROUND {t}  {hop}")
    for r in gpus:
        step = steps[r]
        origin = "" if t == 0 else f", from GPU {(r - 1) % P}, where {'it was born' if t == 1 else 'it passed through'}"
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
    ring_out = np.concatenate([step.o / step.l[:, None] for step in steps[-1]])
    full = full_attention(causal)
    print("\nRESULT  after all 4 rounds every GPU has met every block; it divides once: out = o / l\n")
    print("    token | out of the ring | full attention  | difference")
    for token in (C * r + i for r in gpus for i in range(C)):
        both = f"{numbers(ring_out[token], 8, 4)} |{numbers(full[token], 8, 4)}"
        print(f"    {token:>5} |{both} |{np.abs(ring_out[token] - full[token]).max():>8.0e}")
    ok = np.abs(ring_out - full).max() < 1e-14
    print(f"\n{'ok   ' if ok else 'WRONG'} the ring equals {'causal ' * causal}softmax(QK^T/sqrt(2))V of all 8 tokens")
    try:
        import torch
    except ImportError:
        print("      (torch is not installed: not compared with its scaled_dot_product_attention)")
        return ok
    x = torch.tensor(TOKENS)[None]
    sdpa = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)[0].numpy()
    agrees = np.abs(ring_out - sdpa).max() < 1e-14
    print(f"{'ok   ' if agrees else 'WRONG'} and torch's scaled_dot_product_attention in float64")
    return ok and agrees


# ---------------------------------------------------------------------------------------------------------------------
# The published page in its own order: round, GPU, what it shows, the two rows it prints, the mistake in each (or "").

PUBLISHED = [
    (0, 0, "q.k", ((1, 0), (0, 1)), ("", "")),
    (0, 0, "scores", ((0.707, 0), (0, 0.707)), ("", "")),
    (0, 0, "weights", ((0.731, 0.269), (0.269, 0.731)), ("A", "A")),
    (0, 0, "output", ((0.731, 0.269), (0.269, 0.731)), ("A", "A")),
    (0, 1, "q.k", ((2, 3), (2, 5)), ("", "B")),
    (0, 1, "scores", ((1.414, 2.121), (1.414, 3.536)), ("", "B")),
    (0, 1, "weights", ((0.310, 0.690), (0.142, 0.858)), ("C", "C")),
    (0, 1, "output", ((0.69, 1.38), (0.858, 1.716)), ("D", "D")),
    (1, 0, "q.k", ((3, 3), (1, 3)), ("", "")),
    (1, 0, "scores", ((2.121, 2.121), (0.707, 2.121)), ("", "")),
    (1, 0, "weights", ((0.5, 0.5), (0.219, 0.781)), ("", "E")),
    (1, 0, "output", ((3, 2), (2.438, 2.562)), ("", "F")),
    (1, 0, "so far", ((3.731, 2.269), (2.707, 3.293)), ("H", "H")),
    (1, 1, "q.k", ((1, 1), (1, 2)), ("", "")),
    (1, 1, "scores", ((0.707, 0.707), (0.707, 1.414)), ("", "")),
    (1, 1, "weights", ((0.5, 0.5), (0.269, 0.731)), ("", "G")),
    (1, 1, "output", ((0.5, 0.5), (0.269, 0.731)), ("", "G")),
    (1, 1, "so far", ((1.19, 1.88), (0.411, 1.589)), ("H", "I")),
]


def exact(step: Step, i: int, what: str) -> np.ndarray:
    """The right value of what the page shows for row i of a step: two numbers."""
    weights = softmax(step.scores[i])
    return {
        "q.k": step.scores[i] * math.sqrt(2),
        "scores": step.scores[i],
        "weights": weights,
        "output": weights @ rows(step.block),
        "so far": step.o[i] / step.l[i],
    }[what]


def why() -> dict[str, str]:
    """What went wrong on the page, by letter; every number in these lines is computed here."""

    seven_tokens = softmax(TOKENS[0] @ TOKENS[:7].T / math.sqrt(2)) @ TOKENS[:7]
    in_hand = [step.block for step in ring()[2]]
    return {
        "A": f"softmax([1 0]) = {listed(softmax(np.array([1, 0])))}: the scores were not divided by sqrt(2).",
        "B": "[1 2].[1 1] = 1 + 2 = 3, not 2; and 3/sqrt(2) = 2.121.",
        "C": "the softmax of no scores that the page prints; of [1.414 3.536] it is "
        f"{listed(softmax(np.array([1.414, 3.536])))}.",
        "D": f"only the second value row was weighed: 0.690 x [1 2] = {listed(0.690 * TOKENS[3])}. Both rows of KV1 "
        "begin with 1, so every average of them begins with 1.",
        "E": f"the softmax of [0.707 2.121] is {listed(softmax(np.array([1, 3]) / math.sqrt(2)))}.",
        "F": "both rows of KV3 begin with 3, so every average does; the page's own weights give "
        f"{listed(np.array([0.219, 0.781]) @ rows(3))}.",
        "G": f"softmax([1 2]) = {listed(softmax(np.array([1, 2])))}: sqrt(2) was left out again.",
        "H": "'Output += block output' adds two averages, so the weights add up to 2. See below.",
        "I": "the same, and for token 3 it adds the weights [0.142 0.858] where it means the output [0.858 1.716].",
        "J": "'GPU 0 receives KV[3]': blocks are named by number here and by tokens elsewhere; it is block 3, KV[6:8].",
        "K": "'after round 1 GPU 0 has KV[2:4], originally from GPU 1; GPU 1 has KV[3:4]': in round 2 GPU 0 holds "
        f"block {in_hand[0]} (tokens 4 and 5, born on GPU 2) and GPU 1 holds block {in_hand[1]} (tokens 6 and 7).",
        "L": "'Full Attention = Q K^T V' leaves out the softmax and the scale; for token 0 it would be "
        f"{listed((TOKENS @ TOKENS.T @ TOKENS)[0])}.",
        "M": "'no KV chunk on more than one GPU at a time': during a hop the sender and the receiver both hold it.",
        "N": "'each GPU sends the same amount each round': 4 rounds have 3 hops; after the last round nobody sends.",
        "O": "'16 values against 4' counts one of Q, K and V. By the paper's count a GPU holds 6 chunks of 4 values "
        "(Q, K and V in hand, K and V arriving, the output), 24; one GPU with all tokens has 4 x 16 = 64 and the 8 x 8 "
        "scores.",
        "P": "'n divisible by P' is not needed: with token 7 left out GPU 3 has one token, and token 0 gets "
        f"{listed(seven_tokens)}.",
    }


def print_published() -> None:
    steps = ring()
    print("PUBLISHED  what the page prints, beside the exact value ('so far' is its 'Accumulate')\n")
    print("    round  GPU  token  shows     printed          exact")
    for t, r, what, printed_rows, letters in PUBLISHED:
        for i, (printed, letter) in enumerate(zip(printed_rows, letters, strict=True)):
            verdict = f"wrong, see {letter}" if letter else "right"
            both = f"{numbers(np.array(printed))}  {numbers(exact(steps[t][r], i, what))}"
            print(f"{t:>9}  {r:>3}  {C * r + i:>5}  {what:<7}{both}   {verdict}")

    print("\nWHY  (J to P are about its prose)\n")
    for letter, text in why().items():
        print(textwrap.fill(text, 100, initial_indent=f"  {letter}  ", subsequent_indent="     "))

    print("\nTHE SUM OF AVERAGES  3.731 is not attention: what adding block outputs does to token 0, on GPU 0\n")
    print("    round | block |  block output  | their sum      its weights add to | the ring's o/l so far")
    total = np.zeros(2)
    for t in range(P):
        step = steps[t][0]
        output = exact(step, 0, "output")
        total += output
        block = paint(step.block, f"  KV{step.block}")
        line = f"{t:>9} |{block}  |{numbers(output)}  |{numbers(total)}"
        print(f"{line}{t + 1:>19}  |{numbers(exact(step, 0, 'so far'))}")
    moral = f"""
        The page stops after round 1 at [3.731 2.269]; with mistake A mended its sum is [3.670 2.330]. No value of
        the example exceeds 3, so no average can. Even the sum divided by 4, {listed(total / P)}, is wrong: it gives
        every block the same say, and token 0 gives KV0 to KV3 {listed(block_shares())}. Each partial result must be
        rescaled to the common max, and the whole divided by l once: [2.269 1.650]. (That 2.269 stands in both lists is
        chance: there it is the second number, here the first.)"""
    print("\n" + textwrap.fill(" ".join(moral.split()), 98, initial_indent="  ", subsequent_indent="  "))


def block_shares() -> np.ndarray:
    """How much of token 0's attention each block gets, (P,): sums of the weights of full attention."""
    return softmax(TOKENS[0] @ TOKENS.T / math.sqrt(2)).reshape(P, C).sum(axis=1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ring Attention by hand: 4 GPUs, 8 tokens, every number.")
    parser.add_argument("--gpu", type=int, choices=range(P), help="only this GPU")
    parser.add_argument("--round", type=int, choices=range(P), help="only this round")
    parser.add_argument("--causal", action="store_true", help="a token sees itself and the tokens before it")
    parser.add_argument("--published", action="store_true", help="the published page beside the exact values")
    args = parser.parse_args(argv)
    if args.published:
        if args.causal or args.gpu is not None or args.round is not None:
            parser.error("argument --published: shows the whole page, which has no mask; leave out the other options")
        print_published()
        return 0
    steps = ring(args.causal)
    gpus = range(P) if args.gpu is None else [args.gpu]
    print_setup()
    for t in range(P) if args.round is None else [args.round]:
        print_round(t, steps[t], gpus, args.causal)
    return 0 if print_result(steps, gpus, args.causal) else 1


if __name__ == "__main__":
    sys.exit(main())

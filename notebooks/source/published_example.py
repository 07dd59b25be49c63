"""A published version of the worked example ends in 3.731; full attention gives 2.269. This file checks that page.

    the page:  out = out_0 + out_3 + ...             a sum of averages: its weights add up to 2 after two blocks
    right:     out = Σ_j e^(lse_j - lse) out_j       each block counts with its share of the whole sum of e^score

Shapes: as in worked_example.py. Every row of the page is two numbers: one token's scores, weights or output, (2,).

    $ python -m notebooks.source.published_example
    ...
        round  GPU  token  shows     printed          exact
    ...
            1    0      0  so far   3.731  2.269    2.642  1.744   wrong, see H
    ...
    ok    18 of the 36 rows are wrong, and each of these has its explanation
    ...

Before: worked_example.py, the exact values. After: nothing; this is an appendix.
Source: "Worked Example: Ring Attention Step-by-Step", section 05 of a course on Ring Attention, 4 GPUs and 8 tokens.
"""

import math
import sys
import textwrap

import numpy as np

from worked_example import TOKENS, C, Step, numbers, ring, rows, softmax

# The rows of the page in its own order: round, GPU, what it shows, the two rows it prints, the letter of each mistake.
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
PRINTED_TO = 0.0006  # the page prints three decimals, so half a unit of the third, and a little for its own rounding


def exact(step: Step, i: int, what: str) -> np.ndarray:
    """The right value of what the page shows for token i (0 or 1) of a step: two numbers."""
    weights = softmax(step.scores[i])
    return {
        "q.k": step.scores[i] * math.sqrt(2),
        "scores": step.scores[i],
        "weights": weights,
        "output": weights @ rows(step.block),
        "so far": step.o[i] / step.l[i],
    }[what]


def show(values: np.ndarray) -> str:
    """[0.731 0.269]"""
    return "[" + " ".join(f"{value:.3f}" for value in values) + "]"


def explanations() -> dict[str, str]:
    """What is wrong on the page, by letter. Every number that follows from the example is computed here."""
    seven_tokens = softmax(TOKENS[0] @ TOKENS[:7].T / math.sqrt(2)) @ TOKENS[:7]
    in_hand = [step.block for step in ring()[2]]
    return {
        "A": f"The scores were not divided by sqrt(2): softmax([1 0]) = {show(softmax(np.array([1, 0])))}.",
        "B": f"[1 2].[1 1] = 1 + 2 = 3, not 2; and 3/sqrt(2) = {3 / math.sqrt(2):.3f}.",
        "C": "These are not the softmax of any scores on the page. "
        f"softmax([1.414 3.536]) = {show(softmax(np.array([1.414, 3.536])))}.",
        "D": f"Only the second value was used: 0.690 x [1 2] = {show(0.690 * TOKENS[3])}. Both values of KV1 begin "
        "with 1, so every average of them begins with 1.",
        "E": f"softmax([0.707 2.121]) = {show(softmax(np.array([1, 3]) / math.sqrt(2)))}.",
        "F": "Both values of KV3 begin with 3, so every average of them begins with 3. The page's own weights give "
        f"{show(np.array([0.219, 0.781]) @ rows(3))}.",
        "G": f"The scores were not divided by sqrt(2) again: softmax([1 2]) = {show(softmax(np.array([1, 2])))}.",
        "H": "'Output += block output' adds two averages, so the weights add up to 2 (chapter 3).",
        "I": "As H. And for token 3 the page adds the weights [0.142 0.858] instead of the output [0.858 1.716].",
        "J": "'GPU 0 receives KV[3]': here a block has a number, elsewhere on the page it has tokens. It is KV[6:8].",
        "K": "'After round 1 GPU 0 has KV[2:4], originally from GPU 1; GPU 1 has KV[3:4]': in round 2 GPU 0 holds "
        f"block {in_hand[0]} (tokens {C * in_hand[0]} and {C * in_hand[0] + 1}) and GPU 1 holds block {in_hand[1]} "
        f"(tokens {C * in_hand[1]} and {C * in_hand[1] + 1}).",
        "L": "'Full Attention = Q K^T V' leaves out the softmax and the scale. For token 0 it would be "
        f"{show((TOKENS @ TOKENS.T @ TOKENS)[0])}.",
        "M": "'No KV chunk on more than one GPU at a time': during a hop the sender and the receiver both hold it.",
        "N": "'Each GPU sends the same amount each round': 4 rounds have 3 hops. After the last round no GPU sends.",
        "O": f"'16 values against 4' counts one of Q, K and V. The paper counts 6 chunks of {rows(0).size} values on a "
        f"GPU (Q, K and V in hand, K and V arriving, the output): {6 * rows(0).size}. One GPU with all tokens holds "
        f"Q, K, V and the output, {4 * TOKENS.size} values, and the {len(TOKENS)} x {len(TOKENS)} scores.",
        "P": "'n divisible by P' is not needed. Without token 7, GPU 3 has one token, and token 0 gets "
        f"{show(seven_tokens)}.",
    }


def print_rows(steps: list[list[Step]]) -> bool:
    """Every row of the page beside its exact value. Returns whether exactly the wrong rows have an explanation."""
    print("PUBLISHED  what the page prints, beside the exact value ('so far' is its 'Accumulate')\n")
    print("    round  GPU  token  shows     printed          exact")
    known = explanations()
    wrong, explained = [], []
    for t, r, what, printed_rows, letters in PUBLISHED:
        for i, (printed, letter) in enumerate(zip(printed_rows, letters, strict=True)):
            value = exact(steps[t][r], i, what)
            wrong.append(bool(np.abs(value - printed).max() > PRINTED_TO))
            explained.append(letter in known)
            verdict = f"wrong, see {letter}" if wrong[-1] else "right"
            both = f"{numbers(np.array(printed))}  {numbers(value)}"
            print(f"{t:>9}  {r:>3}  {C * r + i:>5}  {what:<7}{both}   {verdict}")
    ok = wrong == explained
    print(
        f"\n{'ok   ' if ok else 'WRONG'} {sum(wrong)} of the {len(wrong)} rows are wrong, and each of these has its "
        "explanation"
    )
    return ok


def print_explanations() -> None:
    """The list of mistakes."""
    print("\nWHY  (J to P are about its prose)\n")
    for letter, text in explanations().items():
        print(textwrap.fill(text, 100, initial_indent=f"  {letter}  ", subsequent_indent="     "))


def main() -> int:
    steps = ring()
    ok = print_rows(steps)
    print_explanations()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

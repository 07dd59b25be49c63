"""Checks of chapter 9: the chunk for training, ring or all-to-all, one slow hop."""

from collections.abc import Callable
from typing import Any

from notebooks.checks.answers import NotYet, exercise


@exercise
def check_training_chunk(answer: Any) -> str | None:
    """Tokens from which on hops are free: F/B = 24,960, bfloat16, H = 32, G = 8, causal zigzag, both ways."""
    hints = {
        24_960: "that is F/B, without a mask, with G = H, and forwards",
        29_952: "that is the backward pass of G = H without a mask",
        49_920: "a mask doubles it; but only 8 of 32 heads travel, and backwards gradients do too",
        12_480: "that is enough forwards; backwards dK and dV travel as well, in float32",
        7_488: "half of each block is hidden by the mask; its bytes are not",
        6_240: "that is one pass without a mask; under it half is computed and all is sent, and backwards more is sent",
        59_904: "only 8 of 32 heads travel",
        9_984: "backwards in bfloat16? The gradients travel in float32: 2 + 4 bytes",
        37_440: "backwards there are five products, 10 C C H D FLOPs, not 4",
        27_456: "the chunk must do for each pass, not for both together: the larger one",
    }
    if abs(answer - 14_976) < 1:
        return "the backward pass asks for 6/5 of what the forward pass does"
    for wrong, hint in hints.items():
        if abs(answer - wrong) < 1:
            raise NotYet(hint)
    raise NotYet(f"2 for the mask, G/H, and (w + 4)/5 backwards, times F/B; you say {answer:,g}")


@exercise
def check_fewer_bytes(answer: Callable[[int, int, int], str]) -> str | None:
    """(P, H, G) -> "ring" or "all-to-all", whichever sends fewer bytes; "ring" where they are equal or it must."""
    for P, H, G in ((8, 32, 32), (3, 32, 32), (4, 32, 8), (2, 8, 8), (8, 32, 8), (16, 32, 8), (1, 8, 8)):
        given = answer(P, H, G)
        possible, ring, swapped = G % P == 0, P * G, H + G
        if given == ("all-to-all" if possible and ring > swapped else "ring"):
            continue
        hint = f"the ring sends P G/(H + G) = {ring / swapped:.2g} times the bytes of all-to-all"
        if given not in ("ring", "all-to-all"):
            hint = 'expected "ring" or "all-to-all"'
        elif not possible:
            hint = f"{G} heads of K and V cannot be dealt to {P} ranks"
        elif ring == swapped:
            hint = 'both send as many bytes: "ring", whose bytes hide'
        raise NotYet(f"P = {P}, {H} heads on {G}, you say {given!r}: {hint}")
    return "and remember that the ring's bytes hide behind computing"


@exercise
def check_unlike_links(answer: Callable[[float, list[float]], float]) -> str | None:
    """(seconds of computing on a block, seconds of each hop) -> seconds of the overlapped ring."""
    for computing, hops in ((2.0, [1.0, 1.0, 1.0, 1.0]), (2.0, [1.0, 7.0, 1.0, 1.0]), (2.0, [1.0])):
        given = answer(computing, list(hops))
        P, slowest, average = len(hops), max(hops), sum(hops) / len(hops)
        right = computing + (P - 1) * max(computing, slowest)
        if abs(given - right) < 1e-9:
            continue
        hints = [
            (P * max(computing, slowest), "P rounds, but P - 1 hops: the last round only computes"),
            (computing + (P - 1) * (computing + slowest), "it overlaps: the longer of the two, not their sum"),
            (computing + (P - 1) * max(computing, average), "not the average: everyone waits for the slowest hop"),
            (computing + sum(max(computing, hop) for hop in hops[1:]), "the slow link is used in every round"),
            (P * computing, "that is computing alone; here a hop takes longer than that"),
        ]
        hint = next((hint for wrong, hint in hints if abs(given - wrong) < 1e-9), f"it is {right:g} s: draw the rounds")
        raise NotYet(f"computing {computing:g} s, hops {hops}, you say {given:g}: {hint}")
    return "one slow hop, and all rounds but the last take as long as it"

"""Checks of chapter 10: peak memory, the longest sequence, how many devices."""

from collections.abc import Callable
from typing import Any

from notebooks.checks.answers import NotYet, exercise


@exercise
def check_peak_memory_of_a_ring(answer: Callable[..., float]) -> str | None:
    """(H, G, D, C, w) -> bytes that a device of a ring holds in the forward pass of a layer."""
    for heads, kv_heads in ((32, 4), (6, 3)):
        given = answer(heads, kv_heads, 64, 1000, 2)
        head = 64 * 1000 * 2
        if given == (2 * heads + 4 * kv_heads) * head:
            continue
        hints = {
            6 * heads * head: "K and V have G heads, not H",
            6 * heads * head // 2: "the paper's 6bch: numbers, not bytes, and with G = H",
            (2 * heads + 4 * kv_heads) * head // 2: "these are numbers; each has `itemsize` bytes",
            (2 * heads + 2 * kv_heads) * head: "the next K and V arrive while those in hand are used",
            (heads + 4 * kv_heads) * head: "both q and out stay: two of H heads",
            (2 * heads + 3 * kv_heads) * head: "a K and a V in hand, and a K and a V that arrive: four of G heads",
        }
        hint = hints.get(given, "q and out of H heads; K and V of G heads, in hand and arriving; C tokens of each")
        raise NotYet(f"H = {heads}, G = {kv_heads}, D = 64, C = 1000, 2 bytes, you say {given:,}: {hint}")


@exercise
def check_longest_sequence(answer: Callable[..., int]) -> str | None:
    """(memory, state, token, P) -> the most tokens that P devices hold beside their share of the state."""
    cases = ((100, 40, 7, 4), (100, 0, 7, 2), (100, 500, 7, 4))
    for memory, state, token, world_size in cases:
        given = answer(memory, state, token, world_size)
        expected = world_size * max(0, int((memory - state / world_size) / token))
        if given == expected:
            continue
        hint = "on each device: memory - state / P bytes are left for tokens"
        if given < 0:
            hint = "where the state does not fit there is no room for tokens: 0, not less"
        elif given == world_size * max(0, int((memory - state) / token)):
            hint = "the state is shared out: a device holds state / P"
        elif given == world_size * int(memory / token):
            hint = "weights, gradients and moments take room too"
        elif given == expected / world_size:
            hint = "that is what one device holds; there are P"
        elif given == expected + world_size:
            hint = "a device cannot hold a part of a token: round down"
        elif given != int(given) or given == int((world_size * memory - state) / token):
            hint = "every device holds whole tokens, as many as the others: round down on each, then multiply"
        where = f"memory {memory}, state {state}, token {token}, P = {world_size}"
        raise NotYet(f"{where}, you say {given:g}: {hint}")


@exercise
def check_devices_needed(answer: Any) -> str | None:
    """Devices of 80e9 bytes for 4,000,000 tokens of 344,064 bytes and a state of 90.2e9 bytes."""
    if answer == 19:
        return "18.3 of them, so 19"
    hints = [
        (17.2, "the state takes room too: add its 90.2e9 bytes"),
        (18, "17.2 for the tokens and 1.1 for the state are 18.3: 18 are too few"),
        (18.3, "there is no third of a device: round up"),
        (20, "round up once, after adding: tokens and state share the devices"),
    ]
    hint = next((hint for wrong, hint in hints if abs(answer - wrong) < 0.05), "(state + tokens · token) / memory")
    raise NotYet(hint)

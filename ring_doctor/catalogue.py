"""All the mistakes that the doctor knows: those of seven tables by what they return, and some by the way to ask.

Shapes: those of paper_ring.py.

    $ python -m ring_doctor.catalogue
    ...
    averages_added: The blocks' own softmax averages are added up. The weights of a row add up to the number of blocks.
    ...

Before: mistakes_of_merging.py, mistakes_of_travel.py, mistakes_of_masks.py, mistakes_of_other_ways.py,
mistakes_of_gradients.py, mistakes_of_backward.py, mistakes_of_states.py.
After: diagnosis.py, which compares a ring with all of them.
Source: each entry names who had it, where that is public; BY_WAY is what the users of public rings met.
"""

import sys

from ring_doctor import (
    mistakes_of_backward,
    mistakes_of_gradients,
    mistakes_of_masks,
    mistakes_of_merging,
    mistakes_of_models,
    mistakes_of_other_ways,
    mistakes_of_travel,
)
from ring_doctor.mistakes import CATALOGUE, entry
from ring_doctor.mistakes_of_states import MISTAKES as OF_STATES
from ring_doctor.names import module_named

TABLES = (
    mistakes_of_other_ways,
    mistakes_of_gradients,
    mistakes_of_backward,
    mistakes_of_masks,
    mistakes_of_merging,
    mistakes_of_travel,
)
CATALOGUE.update((mistake.name, mistake) for table in TABLES for mistake in table.MISTAKES)

# Rings that compute rightly when called plainly, and wrongly in another way. No number tells these mistakes, the way to
# ask does: one is named when every wrong answer was asked in its way.
KEPT = "what lies outside ctx.save_for_backward: buffers, module attributes, dictionaries by shape"
FROZEN = "needs_input_grad, and what the backward pass leaves out because of it"

# fmt: off
BY_WAY = {  # the way to ask of a Question: the mistake
    "views": entry(
        "strides_ignored",
        "Tensors are read as if they were contiguous. Transposed or expanded inputs give other numbers.",
        "view(), empty_like() and every send or kernel call: .contiguous() comes before them", 5),
    "twice": entry(
        "changed_by_a_call",
        "A second call with the same input gives other numbers: the first call leaves something behind.", KEPT, 5),
    "interleaved": entry(
        "buffers_shared_by_calls",
        "A second forward pass overwrites what the first one kept for its backward pass, as in two layers.", KEPT, 5),
    "after another length": entry(
        "state_of_another_length",
        "A mask, a buffer or positions of an earlier call are used in a call with another length.", KEPT, 7),
    "two backward passes": entry(
        "gradients_kept_in_a_buffer",
        "A second backward pass over the same graph gives other gradients: sums begin where the first pass ended.",
        "buffers of dQ, dK and dV that are made in the forward pass, or are not set to zero", 5),
    "frozen keys": entry(
        "frozen_keys_forgotten", "Where K needs no gradient, the gradients of Q and V are wrong.", FROZEN, 5),
    "frozen keys and values": entry(
        "frozen_keys_and_values_forgotten", "Where K and V need no gradient, the gradient of Q is wrong.", FROZEN, 5),
    "without gradients": entry(
        "another_way_without_gradients", "Under torch.no_grad the ring computes in another way, and wrongly.",
        "torch.is_grad_enabled(), requires_grad, self.training: the code that only inference takes", 5),
    "autocast": entry(
        "autocast_forgotten",
        "Under autocast the inputs have other dtypes than scaled_dot_product_attention would give them.",
        "custom_fwd and custom_bwd of torch.amp, or the casts at the beginning of the ring", 8),
}
# fmt: on


def enter(name: str) -> None:
    """Enter the mistakes of a module or of a file, my.py. Raises ValueError when it has none, or is none."""
    home = module_named(name).__name__
    if not any(variant.__module__ == home for mistake in CATALOGUE.values() for variant in mistake.variants):
        raise ValueError(f"{name} has no mistakes; expected functions under @mistake(...) of ring_doctor.mistakes")


def main() -> int:
    others = (*BY_WAY.values(), *OF_STATES)
    every = CATALOGUE | {mistake.name: mistake for mistake in others} | mistakes_of_models.MISTAKES
    for name, mistake in sorted(every.items()):
        print(f"{name}: {mistake.what}")
        if mistake.wild:
            print(f"    had it: {', '.join(mistake.wild)}")
    print(f"{len(CATALOGUE)} mistakes are known by what they return, {len(BY_WAY)} by when they show")
    print(f"{len(OF_STATES)} mistakes of rings of states, {len(mistakes_of_models.MISTAKES)} of whole models")
    return 0


if __name__ == "__main__":
    sys.exit(main())

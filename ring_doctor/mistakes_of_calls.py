"""The catalogue, continued: rings that compute rightly when called plainly, and wrongly in another way.

No number tells these mistakes: the way to ask does. A mistake is named when every wrong answer was asked in its way.

Shapes: none here.

Before: mistakes_of_backward.py. After: diagnosis.py.
Source: what the users of public rings met; questions.py asks in these ways.
"""

from ring_doctor.mistakes import entry

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

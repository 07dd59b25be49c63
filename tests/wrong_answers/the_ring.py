"""Wrong answers to the exercises of chapter 4, and what each must be told."""

from basics.blocking_messages import Recv, Send
from notebooks.checks.the_ring import check_block_in_hand, check_bytes_sent, check_ring_order

WRONG_ANSWERS = [
    (check_block_in_hand, lambda rank, t, world_size: (rank + t) % world_size, "the other way"),
    (check_block_in_hand, lambda rank, t, world_size: rank, "does not hold KV0"),
    (check_ring_order, lambda r, P: [Send((r + 1) % P), Recv((r - 1) % P)], "circle: [0, 1]"),
    (check_ring_order, lambda r, P: [Recv((r - 1) % P)], "must send to its next"),
    (check_bytes_sent, 8 * 2 * 32 * 131072 * 128 * 2, "8 hops"),
    (check_bytes_sent, 7 * 32 * 131072 * 128 * 2, "K and V travel"),
    (check_bytes_sent, 1, "hops x"),
]

"""Draw every picture again.

$ python -m figures.draw_all
"""

from figures import (
    backward_timeline,
    block_schedule,
    causal_layouts,
    crossover,
    double_ring,
    generation,
    gradients_home,
    hidden_communication,
    in_context_rl,
    kv_rotation,
    longest_training,
    loss_curves,
    masked_ring,
    max_context,
    memory,
    mesh,
    message_order,
    overlap_threshold,
    overlap_timeline,
    retrieval,
    ring_memory,
    ring_timeline,
    running_softmax,
    scoreboard,
    slow_hop,
    speed,
    state_ring,
    token_loss,
    tokens_to_heads,
)

PICTURES = (
    kv_rotation,
    block_schedule,
    message_order,
    running_softmax,
    memory,
    ring_timeline,
    gradients_home,
    overlap_timeline,
    backward_timeline,
    overlap_threshold,
    crossover,
    causal_layouts,
    speed,
    state_ring,
    hidden_communication,
    slow_hop,
    ring_memory,
    max_context,
    scoreboard,
    token_loss,
    mesh,
    loss_curves,
    longest_training,
    masked_ring,
    generation,
    retrieval,
    in_context_rl,
    tokens_to_heads,
    double_ring,
)


def main() -> None:
    for picture in PICTURES:
        picture.save()
        print(f"drawn  {picture.__name__}")


if __name__ == "__main__":
    main()

"""Draw every picture again.

$ python -m figures.draw_all
"""

from figures import (
    block_schedule,
    causal_layouts,
    errors,
    free_hop,
    gradients_home,
    kv_rotation,
    max_context,
    memory,
    message_order,
    overlap_threshold,
    overlap_timeline,
    reach,
    ring_timeline,
    running_softmax,
    slow_hop,
    speed,
    utilisation,
    visible_pairs,
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
    overlap_threshold,
    causal_layouts,
    visible_pairs,
    speed,
    errors,
    free_hop,
    slow_hop,
    reach,
    max_context,
    utilisation,
)


def main() -> None:
    for picture in PICTURES:
        picture.save()
        print(f"drawn  {picture.__name__}")


if __name__ == "__main__":
    main()

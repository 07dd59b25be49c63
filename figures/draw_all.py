"""Draw the pictures that pages show again, or only some.

$ python -m figures.draw_all [NAME ...]

A chapter draws its own pictures: they are its outputs.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from figures import (
    FOLDER,
    backward_timeline,
    block_schedule,
    causal_layouts,
    chosen_keys,
    double_ring,
    gradients_home,
    hidden_communication,
    kv_rotation,
    masked_ring,
    measured,
    measured_models,
    mesh,
    message_order,
    overlap_timeline,
    ring_timeline,
    running_softmax,
    scoreboard,
    slow_hop,
    state_ring,
    token_loss,
    tokens_to_heads,
    wrong_kernel,
)
from ringlab.support import drawing

PAGES: dict[str, Callable[[], drawing.Picture]] = {  # pages show their SVG
    "kv_rotation": kv_rotation.draw,
    "message_order": message_order.draw,
    "hidden_communication": hidden_communication.draw,
    "scoreboard": scoreboard.draw,
    "speed": measured.speed,
    "crossover": measured.crossover,
    "in_context_rl": measured_models.in_context_rl,
}
CHAPTERS: dict[str, Callable[[], drawing.Picture]] = {  # chapters draw them
    "running_softmax": running_softmax.draw,
    "memory": measured.memory,
    "block_schedule": block_schedule.draw,
    "ring_timeline": ring_timeline.draw,
    "gradients_home": gradients_home.draw,
    "overlap_timeline": overlap_timeline.draw,
    "causal_layouts": causal_layouts.draw,
    "backward_timeline": backward_timeline.draw,
    "wrong_kernel": wrong_kernel.draw,
    "overlap_threshold": measured.overlap_threshold,
    "slow_hop": slow_hop.draw,
    "max_context": measured.max_context,
    "token_loss": token_loss.draw,
    "mesh": mesh.draw,
    "loss_curves": measured_models.loss_curves,
    "masked_ring": masked_ring.draw,
    "generation": measured_models.generation,
    "retrieval": measured_models.retrieval,
    "chosen_keys": chosen_keys.draw,
    "tokens_to_heads": tokens_to_heads.draw,
    "double_ring": double_ring.draw,
    "state_ring": state_ring.draw,
}

# those that are drawn for phones, too
NARROW = {"kv_rotation": kv_rotation, "message_order": message_order, "causal_layouts": causal_layouts}


def save(name: str, folder: Path = FOLDER, *, narrow: bool = False) -> None:
    """Write folder/NAME.svg, of one of PAGES; or NAME-narrow.svg, of one of NARROW. The rotation as animation, too."""
    figure = NARROW[name].draw(narrow=True) if narrow else PAGES[name]()
    file = f"{name}-narrow.svg" if narrow else f"{name}.svg"
    folder.joinpath(file).write_text(drawing.svg(figure))
    if name == "kv_rotation":
        kv_rotation.save_gif(folder, narrow=narrow)


def main(names: list[str]) -> None:
    for name in names or PAGES:
        save(name)
        print(f"drawn  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])

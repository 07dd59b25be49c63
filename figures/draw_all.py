"""Draw the pictures that pages show again, or only some.

$ python -m figures.draw_all [NAME ...]

A chapter draws its own pictures: they are its outputs.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from figures import FOLDER, kv_rotation, measured, timelines
from ringlab.support import drawing


def pictures(names: str) -> dict[str, Callable[[], drawing.Picture]]:
    """By name: the function of this name, or `draw` of the file of this name."""
    charts = vars(kv_rotation) | vars(measured) | vars(timelines)
    return {name: charts[name] if name in charts else import_module(f"figures.{name}").draw for name in names.split()}


PAGES = pictures("kv_rotation message_order scoreboard")  # their SVG
CHAPTERS = pictures(  # chapters draw them
    "running_softmax memory  ring_timeline gradients_home overlap_timeline causal_layouts "
    "backward_timeline overlap_threshold slow_hop max_context token_loss mesh "
    "masked_ring tokens_to_heads double_ring state_ring"
)
NARROW = {
    name: import_module(f"figures.{name}") for name in ("kv_rotation", "message_order", "causal_layouts")
}  # phones


def save(name: str, folder: Path = FOLDER, *, narrow: bool = False) -> None:
    """Write folder/NAME.svg, of one of PAGES; or NAME-narrow.svg, of one of NARROW. The rotation as animation, too."""
    figure = NARROW[name].draw(narrow=True) if narrow else PAGES[name]()
    file = f"{name}-narrow.svg" if narrow else f"{name}.svg"
    folder.joinpath(file).write_text(drawing.svg(figure))
    if name == "kv_rotation":
        NARROW[name].save_gif(folder, narrow=narrow)


def main(names: list[str]) -> None:
    for name in names or PAGES:
        save(name)
        print(f"drawn  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])

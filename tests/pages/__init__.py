"""What the tests of pictures share: labels that can be read."""

import itertools


def assert_legible(figure, labels):
    """No label of a drawn figure is small on a page 900 pixels wide, cut, or under another."""
    width, height = figure.bbox.size
    boxes = []
    for label in labels:
        pixels = label.get_fontsize() / 72 * figure.dpi
        assert pixels * 900 / width >= 11, f"{label.get_text()!r} is too small on a page 900 pixels wide"
        boxes.append(label.get_window_extent())
        box = boxes[-1]
        inside = box.x0 >= 5 and box.y0 >= 5 and box.x1 <= width - 5 and box.y1 <= height - 5
        assert inside, f"{label.get_text()!r} is cut"
    for (a, one), (b, other) in itertools.combinations(zip(labels, boxes, strict=True), 2):
        apart = one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0
        assert apart, f"{a.get_text()!r} and {b.get_text()!r} overlap"

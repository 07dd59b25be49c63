"""Right answers to the exercises, written in other ways than the solutions: loops, numpy, torch, other formulas."""

RIGHT_ANSWERS = []

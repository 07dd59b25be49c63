"""Puzzles: design a schedule of messages, and see what it did on 3, 4 and 5 ranks."""

"""Puzzles: design a schedule of messages, and see what it did on real processes."""

"""The other ways to share a sequence: all-gather, all-to-all, hybrid, double ring; jax/, a ring in JAX.

Read all_gather.py first. You may skip this folder until a ring is too slow for your wires: chapters 16 and 17.
"""

"""Linear attention: a state in place of keys and values.

Read linear_attention.py first, then state_ring.py, a ring of states, then short_convolution.py.
"""

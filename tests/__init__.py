"""The proof: every claim of the code above is checked here, and broken rings show that the checks can fail.

Read test_ring_attn.py first. The tests of a concept have its name; those of the doctor are in doctor/.
"""

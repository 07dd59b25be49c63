"""What real training adds to the ring, one idea a file.

Read backward.py, layouts.py, masks.py, schedule.py and flash_ring.py: the trainable ring. You may skip all others
until you want one: steps on the way to it, other ways to share a sequence, linear attention, JAX.
"""

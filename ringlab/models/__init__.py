"""What the ring is for: a transformer, trained over a mesh of processes.

Read transformer.py first, then mesh.py. With a Hugging Face model begin at ../hugging_face/use.py, which has use_ring.
"""

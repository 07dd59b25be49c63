"""Models of transformers in a ring, unchanged: use.py has use_ring. It needs the extra [hf].

Read use.py first, then batch.py: the tokens and labels of a rank. masks.py, attention.py and forward.py are what
use_ring puts into the model, proof.py refuses what it would break, generate.py and trainer.py generate and train.
seam.py holds all that is swapped inside transformers.
"""

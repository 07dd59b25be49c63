"""The same for a training step of a whole model. Read whole_model.py first."""

"""A right file and a wrong one for each step of the workshop."""

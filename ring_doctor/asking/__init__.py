"""How a ring is asked, and what it answers. Read examination.py first."""

"""Real rings over real messages with one mistake each, by what the mistake is about; ../sick_rings.py collects them."""

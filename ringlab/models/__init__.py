"""What the ring is for: a transformer, trained over a mesh of processes."""

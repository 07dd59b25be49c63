"""What the ring is made of: attention, online softmax, blocks, messages, ranks."""

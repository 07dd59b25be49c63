"""What real training adds to the ring, one idea a file."""

"""Is your ring right, and if not, which mistake is it? From tests: `from ringlab import assert_ring`."""

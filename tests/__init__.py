"""The proof: every claim of the code above is checked here, and broken rings show that the checks can fail."""

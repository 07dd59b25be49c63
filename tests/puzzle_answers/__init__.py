"""Right, wrong and cheating answers to the puzzles."""

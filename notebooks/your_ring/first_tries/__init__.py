"""First tries of each step of the workshop. Each is wrong."""

"""What a ring costs before you buy it: hidden communication, memory, the planner."""

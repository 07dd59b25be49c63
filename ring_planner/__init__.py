"""What a ring costs before you buy it: hidden communication, memory, the planner.

Read hidden_communication.py first, then memory.py. The command ring-plan is command.py; plan.py ranks.
"""

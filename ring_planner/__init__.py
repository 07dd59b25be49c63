"""What a ring costs before you buy it: hidden communication, memory, the planner.

README.md has the files in reading order. The command ring-plan is command.py; plan.py ranks.
"""

"""python -m ring_planner is the command ring-plan."""

import sys

from ring_planner.command import main

if __name__ == "__main__":
    sys.exit(main())

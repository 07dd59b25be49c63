"""The mistakes of a training step, by name, with the words of README.md.

Before: mistakes/README.md, those of an attention. After: jobs/verdict.py, which tells them from what is seen.
"""

from pathlib import Path

from ring_doctor.mistakes import words

MISTAKES = words("Whole models", Path(__file__).with_name("README.md"))

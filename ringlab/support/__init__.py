"""What a reader may skip: starting processes, agreeing before sending, a run's record, rounding, colours, pictures."""

import torch

# The full ring calls torch's private kernels, which change without notice. The CPU kernel of 2.8.0 computes
# grouped queries wrongly, without an error; those of 2.11.0, 2.13.0 and 2.15.0 are right. The whole suite was run with
# 2.13.0, `make test` also with 2.11.0 and 2.14.1. pyproject.toml asks for the same range.
OLDEST, TOO_NEW = "2.11", "2.16"

if not OLDEST <= torch.__version__ < TOO_NEW:
    raise ImportError(f"torch {torch.__version__} found; expected torch>={OLDEST},<{TOO_NEW}, as in requirements.txt")

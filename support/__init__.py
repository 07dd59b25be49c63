"""What a reader may skip: starting processes, agreeing before sending, the record of a run, rounding, colours."""

import torch

# The releases of torch that the tests pass with. The trainable ring calls torch's private kernels, which change without
# notice. pyproject.toml asks for the same.
OLDEST, TOO_NEW = "2.8", "2.16"

if not OLDEST <= torch.__version__ < TOO_NEW:
    raise ImportError(f"torch {torch.__version__} found; expected torch>={OLDEST},<{TOO_NEW}, as in requirements.txt")

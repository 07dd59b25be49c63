"""The ring of a blog post, its file codes/ring_attn.py: the source of the even and odd ranks of ../../../ring_attn.py.

The blog is no package. Put the file of the repository AndSonder/space.keter.top, commit 26c3a5e, somewhere, and the
path of the file into the environment variable RING_OF_THE_BLOG.
"""

import contextlib
import io
import os
import runpy

import torch.distributed as dist
from torch import Tensor

ABOUT = "ring_attention_distributed_fwd of the blog's file; for this table, a transcription without its prints"
VERSION = "AndSonder/space.keter.top, commit 26c3a5e"
CAUSAL, UNEQUAL, GROUPED, DTYPES = (False,), False, False, ("float64", "float32")
GRADIENTS = False  # it is a forward pass, and claims no more
WORLDS = (2, 3, 4)  # on one rank it sends to itself, which gloo refuses

if not (PATH := os.environ.get("RING_OF_THE_BLOG")):
    raise ModuleNotFoundError("RING_OF_THE_BLOG is not set")
RING = runpy.run_path(PATH)["ring_attention_distributed_fwd"]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with contextlib.redirect_stdout(io.StringIO()):  # it tells each step
        return RING(q, k, v, rank, world_size, (rank - 1) % world_size, (rank + 1) % world_size)

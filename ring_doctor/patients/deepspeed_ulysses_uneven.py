"""DeepSpeed's Ulysses with a head count that the ranks do not divide: some ranks get one head more."""

import deepspeed.comm as dist
from deepspeed.utils import groups

from ring_doctor.patients import deepspeed_ulysses
from ring_doctor.patients.deepspeed_ulysses import LAYOUTS, TENSORS, UNEQUAL, VERSION, attention
from ringlab.support.processes import RankContext

__all__ = ["LAYOUTS", "TENSORS", "UNEQUAL", "VERSION", "attention", "setup"]
ABOUT = "DistributedAttention of DeepSpeed, unmodified, with 7 heads"
HEADS = 7


def setup(context: RankContext) -> None:
    deepspeed_ulysses.setup(context)
    names = ("data_parallel", "sequence_parallel")  # as deepspeed.initialize does with mesh_param
    groups.mesh_device = dist.initialize_mesh_device((1, context.world_size), names)

"""DeepSpeed's Ulysses with a head count that the ranks do not divide: some ranks get one head more."""

from ringlab.doctor.patients.deepspeed_ulysses import LAYOUTS, TENSORS, UNEQUAL, VERSION, attention, setup

__all__ = ["LAYOUTS", "TENSORS", "UNEQUAL", "VERSION", "attention", "setup"]
ABOUT = "DistributedAttention of DeepSpeed, unmodified, with 7 heads"
HEADS = 7

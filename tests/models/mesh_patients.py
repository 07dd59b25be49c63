"""The ways that need a mesh, as patients of the doctor: the mesh is 2 x 2 for 4 ranks, and one row otherwise.

patient_of(hybrid, setup=setup), or as a patient file: python -m ring_doctor tests.models.mesh_patients
"""

from torch.distributed.device_mesh import init_device_mesh

from ring_doctor.mistakes.other_ways import hosts
from ringlab.ring.flash_ring import ring_flash_attention
from ringlab.ways.double_ring import DoubleRing
from ringlab.ways.hybrid import Hybrid

MESH = {}


def setup(context):
    MESH["of this rank"] = init_device_mesh(context.device.type, hosts(context.world_size))


def hybrid(q, k, v, *, causal=False, layout="contiguous", scale=None):
    options = {"causal": causal, "layout": layout, "scale": scale, "group": MESH["of this rank"]}
    return ring_flash_attention(q, k, v, **options, schedule=Hybrid)


def double_ring(q, k, v, *, causal=False, layout="contiguous", scale=None):
    options = {"causal": causal, "layout": layout, "scale": scale, "group": MESH["of this rank"]}
    return ring_flash_attention(q, k, v, **options, schedule=DoubleRing)


attention = double_ring

"""torch 2.13.0, torch.distributed.nn.functional.all_gather over gloo: wrong gradient when autograd's is not contiguous.

$ torchrun --nproc_per_node=3 torch_all_gather.py      (CPU, gloo; exit status 1 while the bug is there)
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
weights = torch.arange(6.0).reshape(3, 2)  # the same on every rank
wrong = False
for name, lay_out in (("contiguous", torch.Tensor.contiguous), ("transposed", lambda x: x)):
    x = torch.ones(2, 3, requires_grad=True)
    loss = sum((part * lay_out(weights.t())).sum() for part in all_gather(x))
    loss.backward()
    expected = world_size * weights.t()
    ok = torch.equal(x.grad, expected)
    wrong |= not ok
    if rank == 0:
        print(f"{name}: {'ok' if ok else 'WRONG'}, x.grad {x.grad.tolist()}, expected {expected.tolist()}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)

"""megatron-core 0.16.1, forward_step_calc_loss: with context parallelism and a loss mask, tokens weigh unequally.

$ torchrun --nproc_per_node=3 megatron_core.py      (CPU, gloo; exit status 1 while the bug is there)
"""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

CONFIG = SimpleNamespace(calculate_per_token_loss=False, timers=None)


def gradient(x, mask, ranks):
    """d loss / d weight of a loss (x @ weight)**2 over unmasked tokens, as one rank of `ranks` computes it."""
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    losses = (x @ weight) ** 2 * mask

    def loss_func(output):  # (sum of this rank's losses, its unmasked tokens, what is reported)
        return output.sum(), mask.sum().int(), {}

    loss, _ = forward_step_calc_loss(None, losses, loss_func, CONFIG, None, False, 1, [], ranks, True)
    return torch.autograd.grad(loss, weight)[0]


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(8 * world_size, 4, dtype=torch.float64)  # the same on every rank
wrong = False
for name, masked in (("no token masked", 0), ("prompt of 10 tokens masked", 10)):
    mask = (torch.arange(len(x)) >= masked).double()
    right = gradient(x, mask, 1)  # the whole sequence on one rank
    mine = gradient(x.chunk(world_size)[rank], mask.chunk(world_size)[rank], world_size)
    dist.all_reduce(mine)
    mine /= world_size  # what Megatron's DDP does: the mean over data and context parallel ranks
    error = float((mine - right).norm() / right.norm())
    wrong |= error > 1e-12
    if rank == 0:
        print(f"{name}: relative error {error:.2g} of the gradient, {world_size} ranks", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(wrong)

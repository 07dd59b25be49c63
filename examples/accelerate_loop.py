"""A loop with accelerate, two micro-batches a step: torchrun --nproc_per_node=4 examples/accelerate_loop.py"""

import tiny
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed

from ringlab import shard_batch, use_ring


def train() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(0)
    model = tiny.model()
    use_ring(model)  # the group is that of the Accelerator, made above
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)  # not the loader: accelerate would deal it out to ranks
    losses = []
    for first, second in zip(*[iter(tiny.batches())] * 2, strict=True):
        shards = [shard_batch(batch).to(accelerator.device) for batch in (first, second)]
        labels = sum(shard["num_items_in_batch"] for shard in shards)  # of the step, on all ranks
        total = 0.0
        for shard in shards:
            with accelerator.accumulate(model):
                loss = model(**{**shard, "num_items_in_batch": labels}).loss
                # accelerate divides the loss by the micro-batches, and DDP the gradients by the ranks
                accelerator.backward(loss * accelerator.num_processes * accelerator.gradient_accumulation_steps)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach()).item()
        losses.append(total)
    tiny.keep(losses, accelerator.unwrap_model(model))


train()
dist.destroy_process_group()

"""transformers' Trainer, and TRL's, with a sequence on many ranks: each gets the same batch, and trains on its shard.

    loader    accelerate deals batches to rings, not to ranks          a rank: shard_batch of its ring's batch
    loss      a rank: sum over its labels / labels of all micro-batches on all ranks · ranks
    reported  the mean of that over the ranks = the loss of the batch  gradients: DDP's mean = the sum of the parts

A Trainer counts the labels of all ranks, multiplies the loss by their number, and averages loss and gradients over
them. So it already sums parts, if each rank counts the labels of its shard only. Three places remain: what the loader
deals out, the shard, and the evaluation, which takes every rank for a batch of its own. The rest is unchanged:
accumulation, the norm of the gradient, clipping, checkpoints, resuming. TRL's SFTTrainer takes its loss from a fused
head, which takes shifted labels as they are. Of its own numbers one is wrong, num_tokens: the tokens of one shard.

Shapes: the collator gives a batch (B, S), as for one process. It is padded on the right to a multiple that the layout
needs. A rank has (B, C), C = S/P. B is `per_device_train_batch_size`, and here it is that of a ring.

`python examples/compare.py trainer sft` runs both beside one process: a first reader may skip this file.

Use it as a Trainer, in a script that torchrun starts: examples/trainer.py, sft.py. RingTrainer calls use_ring itself.
Any other Trainer becomes one by `class Mine(InRing, Trainer)`.

With mesh=init_device_mesh(..., (dp, cp), mesh_dim_names=("dp", "cp")) there are dp rings, each with batches of its own,
as a Trainer on dp processes. Two numbers stay others: eval_steps_per_second counts ranks in the place of rings, and
total_flos counts the padding too. Trainer seeds all ranks alike, so with dropout all shards drop the same places.

Before: use.py, the model in the ring. After: examples/, what to copy.
Source: transformers 5.23, Trainer; accelerate 1.15, prepare_data_loader; TRL 1.16, SFTTrainer.compute_loss.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ringlab.ring.schedule import Ring
from ringlab.support.agreement import agree, members
from ringlab.support.extras import extra

with extra("loops", __name__):
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader
    from transformers import Trainer

from ringlab.hugging_face.batch import shard_batch
from ringlab.hugging_face.seam import give, take
from ringlab.hugging_face.use import unwrapped, use_ring
from ringlab.models.mesh import AnyLayout, Way
from ringlab.support.expect import expect

BY_SHARD = "would get what belongs to a shard"
WRONG = {  # why an option would be wrong in a ring
    "compute_loss_func": BY_SHARD,
    "compute_metrics": BY_SHARD,
    "preprocess_logits_for_metrics": BY_SHARD,
    "include_for_metrics": BY_SHARD,
    "model_init": "makes a new model when training begins, and no layer of that calls the ring",
    "label_smoothing_factor": "LabelSmoother shifts the labels, which are shifted already",
    "neftune_noise_alpha": "scales its noise by the number of tokens that a rank has",
    "auto_find_batch_size": "a rank may run out of memory alone, and the others would wait for it",
    "use_liger_kernel": "replaces the loss of the model",
    "parallelism_config": "shares out the tokens or the weights in its own way",
    "dispatch_batches": "gives each rank a slice of the batch of rank 0",
    "is_deepspeed_enabled": "averages gradients in its own way",
}
WRONG_VALUES = {
    ("average_tokens_across_devices", False): "each rank would divide by the labels of its own shard",
    ("train_sampling_strategy", "batch_rebalance"): "gives each rank batches of its own",
    ("include_num_input_tokens_seen", "all"): "would count the padding that makes shards equal",
    ("include_num_input_tokens_seen", "non_padding"): "counts with the attention mask, and a shard has none",
    ("model_accepts_loss_kwargs", False): "the model takes no number of labels",
}


def refuse_options(trainer: Any) -> None:
    """Raise ValueError for each option that would be wrong in a ring. All ranks have the same options."""
    given = {**vars(trainer), **vars(trainer.args), **vars(trainer.args.accelerator_config)}
    problems = [f"{name} is {given[name]!r}: {why}" for name, why in WRONG.items() if given.get(name)]
    problems += [f"{name} is {value!r}: {why}" for (name, value), why in WRONG_VALUES.items() if given[name] == value]
    kinds = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.trainer.")]
    problems += [f"{name} has a loss over whole texts" for name in kinds if name != "SFTTrainer" and name[0] != "_"]
    if trainer.rings > 1 and not given["even_batches"]:
        problems += ["even_batches is False: a ring with a batch less would leave the others waiting"]
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        problems += ["fsdp is of version 1, which was never tried here: version 2 has the key 'version' in fsdp_config"]
    if problems:
        raise ValueError("\n".join(f"{reason}; expected a Trainer without it" for reason in problems))


Base: Any = object  # for mypy: the Trainer, whose methods InRing extends, stands after InRing


class InRing(Base):
    """Put it before a Trainer: `class RingTrainer(InRing, Trainer)`. It calls `use_ring` on the model.

    `mesh` has the dimensions "dp" and "cp", and all ranks in rising order (None: one ring of the whole job). Raises
    ValueError, on every rank, for an option that would be wrong in a ring.
    """

    model_wrapped: nn.Module  # Trainer's

    def __init__(
        self, *args: Any, mesh: DeviceMesh | None = None, layout: AnyLayout = "zigzag", way: Way = Ring, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _, world_size = members()
        seen = self.accelerator.num_processes
        sees = f"accelerate sees {seen} process(es) of {world_size}, so nothing would sum their gradients"
        expect(seen == world_size, sees, "the script to be started by torchrun, and use_cpu=True on CPUs")
        ours = mesh is None or (mesh.mesh_dim_names, mesh.mesh.flatten().tolist()) == (("dp", "cp"), [*range(seen)])
        expect(ours, f"mesh is {mesh}", f"dimensions dp and cp, over the ranks 0 to {world_size - 1}")
        self.layout, self.cp = layout, mesh["cp"] if mesh else None
        self.ring, self.rings = (mesh["dp"].get_local_rank(), mesh["dp"].size()) if mesh else (0, 1)
        self.ranks = world_size // self.rings  # of a ring
        refuse_options(self)
        use_ring(self.model, self.cp, layout, way)
        self.seen: set[bool] = set()
        give(self, compute_loss=partial(self.compared, self.compute_loss))  # whatever class it is of
        gather = self.accelerator.gather  # gather_for_metrics would drop ranks of a short last batch
        give(self.accelerator, prepare_data_loader=self.loader_of_ring, gather_for_metrics=gather)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As that of a Trainer; after an evaluation too, for which accelerate takes the model as it is, for good."""
        if not sums_gradients(self.model_wrapped):
            self.model_wrapped = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            take(self.model, "_is_accelerate_prepared")
            self.accelerator._models.clear()
        return super().train(*args, **kwargs)

    def loader_of_ring(self, loader: DataLoader, **_: Any) -> DataLoader:
        """As accelerate prepares it, with rings in the place of processes."""
        ours = self.accelerator
        options = {name: getattr(ours, name) for name in ("even_batches", "split_batches", "use_seedable_sampler")}
        options |= {"non_blocking": ours.non_blocking, "put_on_device": True, "dispatch_batches": False}
        options |= {"rng_types": ours.rng_types.copy(), "data_seed": ours.dataloader_config.data_seed}
        return prepare_data_loader(loader, ours.device, self.rings, self.ring, **options)

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch (B, S) of this ring -> this rank's (B, C)."""
        batch = {name: x for name, x in batch.items() if name != "seq_idx"}  # for convolutions, which no ring has
        needed = {"input_ids", "labels"} <= batch.keys()
        expect(needed, f"a batch of {', '.join(batch)}", "input_ids and labels: the data collator makes them")
        return shard_batch(batch, self.cp, self.layout, pad_to=1)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        return super().get_batch_samples(map(self.shard, epoch_iterator), num_batches, device)

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.ranks

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`inputs` are a shard. TRL evaluates without a number of labels: then it is that of each ring's batch."""
        if num_items_in_batch is None:
            num_items_in_batch = inputs["num_items_in_batch"] * self.rings
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def compared(
        self, compute: Callable[..., Any], model: nn.Module, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        """The loss of `compute`, which a class of a user's own may have. The first of each mode is that of the ring."""
        summed = not model.training or self.accelerator.num_processes == 1 or sums_gradients(model)
        wanted = "DDP or fully_shard, as train() of this class gives them"
        expect(summed, "the model in training is in nothing that sums gradients over the ranks", wanted)
        ring = vars(unwrapped(self.model)).get("ring", [None])[0]
        expect(ring, "the model has left its ring", "use_ring(trainer.model, ...) with the Trainer's mesh and layout")
        before = ring.now
        result = compute(model, inputs, return_outputs, **options)
        if model.training not in self.seen:
            self.seen.add(model.training)
            loss, name = (result[0] if return_outputs else result).detach(), type(self).__name__
            kinds = [kind.__module__ for kind in type(self).__mro__ if "compute_loss" in vars(kind)]
            theirs = all(kind.partition(".")[0] in ("trl", "transformers", "ringlab") for kind in kinds)

            def check() -> None:
                value = None if ring.now is before else ring.now.value
                right = None if value is None else (value * self.accelerator.num_processes).item()
                same = theirs if right is None else math.isclose(loss.item(), right, rel_tol=1e-4)
                given = f"compute_loss of {name} gives {loss.item():.4f}, and the ring's loss is {right}"
                expect(same, given, "the model's loss as Trainer scales it; more of it by extra_loss in its forward")

            agree(check)
        return result

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = self.losses_of_sequences
        return super().evaluation_loop(*args, **kwargs)

    def losses_of_sequences(self, losses: Tensor) -> Tensor:
        """This rank's part of the loss, B times -> the loss of each ring's batch, once for each of its sequences."""
        every = self.accelerator.gather(losses).view(self.rings, self.ranks, -1).mean(dim=1).flatten()
        state = self.accelerator.gradient_state
        return every[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else every

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        instead = "evaluate, or args.prediction_loss_only=True"
        expect(prediction_loss_only, "predict would collect the logits of shards", instead)
        return super().prediction_step(model, self.shard(inputs), prediction_loss_only, ignore_keys)


def sums_gradients(model: nn.Module) -> bool:
    """Whether the model is in DDP or in fully_shard, compiled or not."""
    return any(isinstance(part, DistributedDataParallel | FSDPModule) for part in model.modules())


class RingTrainer(InRing, Trainer):
    """transformers' Trainer in a ring."""


class InRingSFT(InRing):
    """Put it before TRL's SFTTrainer. It counts the tokens of whole texts."""

    _total_train_tokens: int  # TRL's

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        tokens = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
        return {**super().shard(batch), "tokens": int(tokens)}

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, seen = torch.tensor(inputs.pop("tokens"), device=self.args.device), self._total_train_tokens
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            self._total_train_tokens = seen + self.accelerator.gather(tokens).sum().item() // self.ranks
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss


@cache
def of_trl() -> Any:
    """TRL's SFTTrainer in a ring."""
    with extra("loops", __name__):
        from trl import SFTTrainer
    return type("RingSFTTrainer", (InRingSFT, SFTTrainer), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """RingSFTTrainer is made when it is first asked for. All else here needs no TRL."""
    if name != "RingSFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return of_trl()

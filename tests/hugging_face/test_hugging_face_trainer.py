"""RingTrainer: every number that it reports, and the weights, are those of a Trainer on one process. And the examples.

The model has no layer in float32, so weights agree to float64: a gradient off by 1e-17 becomes 1e-9 of a step where
AdamW divides it by its epsilon, 1e-8. Losses are added up in float32, 1e-7 each.
"""

import gc
import importlib
import math
import os
import re
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ringlab.models.mesh import ContextParallel
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.support import processes
from ringlab.support.agreement import members
from ringlab.support.processes import Ranks
from ringlab.ways.all_gather import AllGather
from tests.commands import ROOT
from tests.concepts import MISSING
from tests.every_way import assert_programs, few_or_many

for package in ("accelerate", "peft", "trl"):
    pytest.importorskip(package, reason=MISSING["trl"])

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from datasets import Dataset, disable_progress_bars  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer  # noqa: E402

from ringlab.hugging_face.batch import padded, shifted  # noqa: E402
from ringlab.hugging_face.generate import spread_generation  # noqa: E402
from ringlab.hugging_face.trainer import InRing, RingSFTTrainer, RingTrainer, refuse_options  # noqa: E402
from ringlab.hugging_face.use import stop_ring, use_ring  # noqa: E402
from ringlab.support.expect import attempt  # noqa: E402
from tests.hugging_face.hugging_face_models import proved_sometimes  # noqa: E402

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import compare  # noqa: E402
import tiny  # noqa: E402

NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "entropy", "mean_token_accuracy")
NUMBERS += ("num_tokens", "eval_entropy", "eval_mean_token_accuracy")
CASES = {
    "accumulation": {"gradient_accumulation_steps": 3, "data_seed": 7},
    "packing": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "lora": {},
}
REFUSED = {
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "include_for_metrics": {"include_for_metrics": ["inputs"]},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "average_tokens_across_devices": {"average_tokens_across_devices": False},
    "train_sampling_strategy": {"train_sampling_strategy": "batch_rebalance"},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": "non_padding"},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
}
FUNCTIONS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


OPTIONS = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
OPTIONS |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2, "num_train_epochs": 1}
OPTIONS |= {"ddp_find_unused_parameters": False, "use_cpu": True}


def rows():
    return tiny.rows()[:7]


def collate(rows):
    """Rows of any lengths -> a batch (B, S), padded on the right."""
    S = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (S - len(row["input_ids"])) for row in rows])
    real = tokens != 0
    return {"input_ids": tokens, "attention_mask": real.long(), "labels": tokens.masked_fill(~real, IGNORED)}


def whole_loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """As transformers' own loss, which computes in float32."""
    return summed_loss(logits, shifted(labels)) / num_items_in_batch


def full(weight):
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


def weights_of(model):
    return torch.cat([full(weight).flatten() for weight in model.parameters()])


def as_torchrun():
    """Set what torchrun sets and accelerate reads, and let it forget other groups. The group is formed already.

    accelerate collects garbage in each training: what is imported is none.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, world_size = members()
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, and not used


def trainer_of(kind, folder, case="", more=None, **options):
    """Seven rows in batches of 1, in the order of a seed; they are evaluated in batches of 2, the last of them of 1."""
    model = tiny.model()
    if kind is Trainer:
        model.loss_function = whole_loss
    args = TrainingArguments(folder, **{**OPTIONS, "learning_rate": 1e-3, **CASES.get(case, {}), **options})
    if case == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    collator = DataCollatorWithFlattening(return_seq_idx=True) if case == "packing" else collate
    data = {"train_dataset": rows(), "eval_dataset": rows(), "data_collator": collator}
    trainer = kind(model=model, args=args, **data, **(more or {}))
    trainer.remove_callback(PrinterCallback)
    return trainer


def reported(trainer):
    """All numbers that a Trainer reported, those of a last evaluation, the rows of a step, and its weights."""
    logs = [*trainer.state.log_history, trainer.evaluate()]
    numbers = {name: [float(log[name]) for log in logs if name in log] for name in NUMBERS}
    return numbers | {"rows": [trainer.get_total_train_batch_size(trainer.args)]}, weights_of(trainer.model)


def run(kind, case="", more=None, **options):
    with TemporaryDirectory() as folder:
        trainer = trainer_of(kind, folder, case, more=more, **options)
        trainer.train()
        return reported(trainer)


def resumed(kind, folder, again):
    """Two epochs, with a checkpoint after each second step; or the same from the checkpoint of step 4 on."""
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    trainer = trainer_of(kind, folder, **options)
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-4")) if again else None)
    return reported(trainer)


class ShiftsAgain(RingTrainer):
    """Planted: a loss of the user's own, which shifts the labels of a shard."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = model(**{**inputs, "labels": None}).logits, inputs["labels"]
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class AddsToIt(RingTrainer):
    """Planted: a regulariser that Trainer's scale multiplies by the number of ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**{**inputs, "num_items_in_batch": num_items_in_batch})
        return (out.loss + 1e-2) * self.accelerator.num_processes


class DoublesInEvaluation(RingTrainer):
    """Planted: a loss that is wrong in the second mode only."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss if model.training else 2 * loss
        return (loss, outputs) if return_outputs else loss


SFT = {"packed": {"packing": True, "eval_packing": False}, "padded, loss_type dft": {"loss_type": "dft"}}


def tokenizer():
    words = {str(number): number for number in range(61)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0")), pad_token="0", eos_token="0")


def sft(kind, case):
    """A small run of TRL's Trainer, whose head computes in float32."""
    options = {"bf16": False, "max_length": 24, "gradient_accumulation_steps": 3}
    options |= {"optim": "sgd", "learning_rate": 0.1}  # AdamW would divide small gradients by themselves
    options |= {"eval_strategy": "steps", "eval_steps": 2}  # before the last step: no number of it counts an evaluation
    data = {"train_dataset": Dataset.from_list(rows()), "eval_dataset": Dataset.from_list(rows())}
    with TemporaryDirectory() as folder:
        args = SFTConfig(folder, **{**OPTIONS, **options, **SFT[case]})
        trainer = kind(model=tiny.model(), args=args, processing_class=tokenizer(), **data)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return reported(trainer)


class Unsummed(RingTrainer):
    """Planted: accelerate takes the model for prepared since its evaluation, and gives it back without DDP."""

    train = Trainer.train


class OfPairs(InRing, Trainer):
    """A Trainer of TRL whose loss is of pairs of whole texts, by its module."""

    __module__ = "trl.trainer.dpo_trainer"


def refusals():
    found = {"DPO": attempt(run, OfPairs)}
    found |= {name: attempt(run, RingTrainer, **options) for name, options in REFUSED.items()}
    found |= {name: attempt(run, RingTrainer, more={name: print}) for name in FUNCTIONS}
    with TemporaryDirectory() as folder:
        trainer = trainer_of(RingTrainer, folder, more={"layout": "striped", "way": AllGather})
        assert trainer.model.ring[0].where == ContextParallel(None, "striped", AllGather)
        stop_ring(trainer.model)
        found["left"] = attempt(trainer.evaluate)
        use_ring(trainer.model)
        found["predict"] = attempt(trainer.predict, rows())
        trainer.data_collator = lambda rows: {"input_ids": collate(rows)["input_ids"]}
        found["labels"] = attempt(trainer.evaluate)
        found |= {kind.__name__: attempt(run, kind) for kind in (ShiftsAgain, AddsToIt, DoublesInEvaluation)}
        found["unsummed"] = attempt(used, Unsummed, ["evaluate", "train"])
        found["model_init"] = attempt(
            RingTrainer, args=trainer.args, model_init=tiny.model, train_dataset=rows(), data_collator=collate
        )
    return found


@proved_sometimes()
def in_a_ring(context, folder):
    """Everything on one ring of three ranks."""
    as_torchrun()
    disable_progress_bars()
    found = {case: run(RingTrainer, case) for case in CASES} | {case: sft(RingSFTTrainer, case) for case in SFT}
    found["first"], found["again"] = (resumed(RingTrainer, folder, again) for again in (False, True))
    return found | {"fsdp2": with_fsdp2()}, refusals()


@proved_sometimes()
def on_a_mesh(context, dp):
    """RingTrainer on dp rings, each of the rest of the ranks; or, with as many ranks as dp, a Trainer.

    And what RingTrainer says before accelerate is told of the other ranks.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    said = attempt(run, RingTrainer)
    as_torchrun()
    if context.world_size == dp:
        return (run(Trainer, "accumulation"), sft(SFTTrainer, "packed")), said
    mesh = init_device_mesh("cpu", (dp, context.world_size // dp), mesh_dim_names=("dp", "cp"))
    unequal = attempt(run, RingTrainer, more={"mesh": mesh}, accelerator_config={"even_batches": False})
    across = DeviceMesh("cpu", mesh.mesh.T, mesh_dim_names=("dp", "cp"))
    turned = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("cp", "dp"))
    others = [attempt(run, RingTrainer, more={"mesh": other}) for other in (across, turned)]
    of_sft = sft(partial(RingSFTTrainer, mesh=mesh), "packed")
    return (run(RingTrainer, "accumulation", more={"mesh": mesh}), of_sft), said, unequal, others


def with_fsdp2():
    """RingTrainer with accelerate's FSDP2, which accelerate gives to GPUs only: so it is told that these are GPUs."""
    create, config = Trainer.create_accelerator_and_postprocess, {"version": 2, "reshard_after_forward": True}

    def told(trainer):
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        create(trainer)

    with mock.patch.object(Trainer, "create_accelerator_and_postprocess", told), TemporaryDirectory() as folder:
        trainer = trainer_of(RingTrainer, folder, "accumulation", fsdp=True, fsdp_config=config)
        trainer.train()
        assert isinstance(trainer.model, FSDPModule)
        return reported(trainer)


def loaded(folder):
    """The weights of the last checkpoint, in a model of its own."""
    last = max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    return weights_of(AutoModelForCausalLM.from_pretrained(last, dtype=torch.float64))


# What must come of it ------------------------------------------------------------------------------------------


def same(result, exact):
    (numbers, weights), (right, right_weights) = result, exact
    for name, values in right.items():
        assert numbers[name] == pytest.approx(values, rel=1e-6, abs=0), name
    if len(weights) == len(weights_of(tiny.model())):
        moved = right_weights - weights_of(tiny.model())
        assert (weights - right_weights).norm() <= 1e-9 * moved.norm()
    assert (weights - right_weights).norm() <= 1e-11 * right_weights.norm()


@pytest.fixture(scope="module")
def pool():
    """Processes of their own: accelerate and Trainer leave much behind."""
    pool = Ranks(4, seconds=300)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def ring(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ring")
    return *pool(3, in_a_ring, folder)[0], folder


@cache
def alone(case):
    return run(Trainer, case)


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_one_process(ring, case):
    same(ring[0][case], alone(case))


def test_a_run_goes_on_from_a_checkpoint_and_a_model_without_a_ring_loads_it(ring, tmp_path):
    found, _, folder = ring
    exact = resumed(Trainer, tmp_path, again=False)
    same(found["first"], exact)
    same(found["again"], resumed(Trainer, tmp_path, again=True))
    assert (found["again"][1] - exact[1]).norm() <= 1e-11 * exact[1].norm()
    assert (loaded(folder) - exact[1]).norm() <= 1e-11 * exact[1].norm()


def test_sft_has_the_numbers_and_weights_of_one_process(ring):
    """16 roundings of float32, in which TRL's head computes; num_tokens are whole numbers."""
    start = weights_of(tiny.model())
    for case in SFT:
        (numbers, weights), (right, right_weights) = ring[0][case], sft(SFTTrainer, case)
        assert {"loss", "entropy", "mean_token_accuracy", "num_tokens"} <= {name for name, x in right.items() if x}
        for name, values in right.items():
            assert numbers[name] == pytest.approx(values, rel=1e-6, abs=0), (case, name)
        assert (weights - right_weights).norm() <= 1e-6 * (right_weights - start).norm(), case


SAID = {name: f"{name} is .*expected a Trainer without it" for name in (*REFUSED, *FUNCTIONS, "model_init")}
SAID |= {name: f"compute_loss of {name} gives " for name in ("ShiftsAgain", "AddsToIt", "DoublesInEvaluation")}
SAID |= {
    "DPO": "^OfPairs has a loss over whole texts; expected a Trainer without it$",
    "unsummed": "the model in training is in nothing that sums gradients",
    "left": "the model has left its ring; expected use_ring",
    "predict": "predict would collect the logits of shards",
    "labels": "expected input_ids and labels",
}


def test_what_would_be_wrong_is_refused_by_name(ring):
    assert {name for name, said in ring[1].items() if not re.search(SAID[name], str(said))} == set()


NOT_INSTALLED = {"use_liger_kernel": True, "parallelism_config": True, "is_deepspeed_enabled": True}
NOT_INSTALLED |= {"include_num_input_tokens_seen": "all", "model_accepts_loss_kwargs": False, "fsdp_version": 1}


@pytest.mark.parametrize("name", [None, *NOT_INSTALLED])
def test_what_needs_more_than_is_installed_here_is_refused_too(name):
    options = {"average_tokens_across_devices": True, "train_sampling_strategy": "random"}
    options |= {"include_num_input_tokens_seen": "no", "model_accepts_loss_kwargs": True, "fsdp_version": 2}
    options |= {name: NOT_INSTALLED[name]} if name else {}
    args = SimpleNamespace(**options, accelerator_config=SimpleNamespace(even_batches=False))
    plugin = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=args))
    with pytest.raises(ValueError, match=name.partition("_version")[0]) if name else nullcontext():
        refuse_options(SimpleNamespace(args=args, rings=1, is_fsdp_enabled=True, accelerator=plugin))


def test_two_rings_are_a_trainer_on_two_processes(pool):
    (results, said, unequal, others), (exact, _) = pool(4, on_a_mesh, 2)[0], pool(2, on_a_mesh, 2)[0]
    same(results[0], exact[0])
    assert results[1][0]["num_tokens"] == exact[1][0]["num_tokens"] != []
    assert results[1][0]["eval_loss"] == pytest.approx(exact[1][0]["eval_loss"], rel=1e-6, abs=0)
    assert "accelerate sees 1 process(es) of 4" in said
    assert "a ring with a batch less would leave the others waiting" in unequal
    assert all("expected dimensions dp and cp, over the ranks 0 to 3" in other for other in others)


def test_weights_that_fsdp2_shares_out_are_those_of_one_process(ring):
    same(ring[0]["fsdp2"], alone("accumulation"))


def test_accelerate_prepares_a_loader_with_all_of_its_options():
    given = {"even_batches": 1, "split_batches": 2, "use_seedable_sampler": 3, "non_blocking": 4, "rng_types": ["5"]}
    ours = SimpleNamespace(**given, device=6, dataloader_config=SimpleNamespace(data_seed=7))
    with mock.patch("ringlab.hugging_face.trainer.prepare_data_loader") as prepared:
        InRing.loader_of_ring(SimpleNamespace(accelerator=ours, rings=8, ring=9), "loader")
    prepared.assert_called_once_with(
        "loader", 6, 8, 9, **given, data_seed=7, put_on_device=True, dispatch_batches=False
    )


def test_a_batch_is_padded_on_the_right():
    batch = collate(rows()[1:2])
    longer = padded(batch, 1, 6)
    last = {name: (x.shape[1], x[0, -1].item()) for name, x in longer.items()}
    assert last == {"input_ids": (18, 0), "attention_mask": (18, 0), "labels": (18, -100)}
    assert padded(longer, 18, 6) is longer
    assert batch["input_ids"].shape == (1, 17)
    assert padded({**batch, "labels": [1]}, 1, 6)["labels"] == [1]  # it is refused later, on every rank


def test_only_the_trainer_of_trl_needs_trl(monkeypatch):
    name = "ringlab.hugging_face.trainer"
    monkeypatch.setitem(sys.modules, "trl", None)  # it cannot be imported
    monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module(name)
    assert issubclass(module.RingTrainer, Trainer)
    assert not hasattr(module, "another name")
    with pytest.raises(ImportError, match=r"trl.* it comes with: pip install"):
        module.RingSFTTrainer  # noqa: B018 (it is made when it is asked for)


# The examples ----------------------------------------------------------------------------------------------------


@contextmanager
def small():
    """One layer, and two steps of the loops: to compile takes a while."""
    with mock.patch.dict(tiny.SIZES, num_hidden_layers=1), mock.patch.object(tiny, "STEPS", 2):
        yield


@proved_sometimes()
def example(context, name, folder, steps=2):
    """The losses and the weights of a script, which runs as it stands on ranks that have joined already."""
    as_torchrun()
    kept = []

    def keep(losses, model):
        kept.append((losses, [full(weight).clone() for weight in model.state_dict().values()]))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tiny, "keep", keep))
        stack.enter_context(small())
        stack.enter_context(mock.patch.multiple(tiny, STEPS=steps, FOLDER=folder))
        stack.enter_context(mock.patch.object(processes, "join_ring", return_value=nullcontext(context)))
        stack.enter_context(mock.patch.object(dist, "destroy_process_group"))
        quick = partial(torch.compile, backend="eager")  # traced as always, and no kernel is made of it
        stack.enter_context(mock.patch.object(torch, "compile", quick))
        exec(compare.script(name), {})
    return kept[0]


@pytest.mark.parametrize("name", compare.ALONE)
def test_an_example_trains_as_one_process_does(pool, name, tmp_path):
    function, arguments, allowed = compare.ALONE[name]
    with small():
        exact, start = function(**arguments), compare.weights_of(tiny.model())
    seen = compare.errors(pool(3, example, name, tmp_path)[0], exact, start)
    assert all(error <= most for error, most in zip(seen, allowed, strict=True)), seen
    if name == "fsdp2":  # it goes on where 2 ranks stopped
        pool(2, example, name, tmp_path / "stopped", 1)
        seen = compare.errors(pool(3, example, name, tmp_path / "stopped")[0], exact, start)
        assert all(error <= most for error, most in zip(seen, allowed, strict=True)), seen


def test_the_one_process_computes_where_the_ranks_do(monkeypatch):
    monkeypatch.setattr(tiny, "DEVICE", "meta")  # a device without numbers
    with pytest.raises(RuntimeError, match=r"item\(\) .*meta"):
        compare.loop()


@pytest.mark.parametrize(
    ("loss", "weight", "ok"),
    [(2.0, 1.0, True), (2.003, 1.0, False), (2.0, 1.002, False), (math.nan, 1.0, False), (2.0, math.nan, False)],
)
def test_the_table_allows_what_rounding_does_and_no_more(monkeypatch, loss, weight, ok):
    """0.1 % here. The weights have moved from 0."""
    exact = [1.0, 2.0], [torch.ones(2)]
    monkeypatch.setattr(compare, "ALONE", {"one": (lambda: exact, {}, (1e-3, 1e-3))})
    monkeypatch.setattr(compare, "weights_of", lambda model: [torch.zeros(2)])
    monkeypatch.setattr(compare, "on_ranks", lambda name, P: ([1.0, loss], [torch.full((2,), weight)]))
    assert [fine for _, fine in compare.table(["one"])] == [True, True, ok, ok]


def test_the_page_has_a_line_for_each_example_which_says_how_it_is_started():
    page = (EXAMPLES / "README.md").read_text()
    scripts = {name.partition(",")[0] for name in compare.ALONE}
    assert {*re.findall(r"^\| \[(\w+)\.py\]", page, flags=re.MULTILINE)} == scripts
    for name in scripts:
        assert f"torchrun --nproc_per_node=4 examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text()


# Sequences of what a Trainer does -------------------------------------------------------------------------------------


def any_use(program, random):
    program.add(random.choice(["train", "evaluate", "train in eval mode", "generate"]))


def used(kind, steps):
    """What a Trainer reports after these steps, and its weights."""
    written = []
    with TemporaryDirectory() as folder:
        trainer = trainer_of(kind, folder, max_steps=2, optim="sgd", learning_rate=0.1)
        for what in steps:
            if what == "train in eval mode":
                trainer.model.eval()  # train() undoes it
            if what == "generate":
                written += generated(trainer.model, kind is RingTrainer)
            else:
                trainer.evaluate() if what == "evaluate" else trainer.train()
        numbers, weights = reported(trainer)
        return {**numbers, "tokens": written}, weights


def generated(model, ring):
    """The tokens of a model that leaves its ring for them."""
    if ring:
        stop_ring(model)
    with spread_generation(model.eval()) if ring else nullcontext():
        tokens = model.generate(collate(rows()[:1])["input_ids"], max_new_tokens=3, do_sample=False)
    if ring:
        use_ring(model)
    return tokens[0].tolist()


@proved_sometimes()
def used_on_rank(context, steps):
    as_torchrun()
    numbers, weights = used(RingTrainer, steps)
    every = [torch.empty_like(weights) for _ in range(context.world_size)]
    dist.all_gather(every, weights)
    assert all(torch.equal(weights, other) for other in every), "the ranks have learned other weights"
    return numbers, weights


@cache
def used_alone(steps):
    return used(Trainer, steps)


def run_uses(pool, P, steps):
    same(pool(P, used_on_rank, steps)[0], used_alone(tuple(steps)))


@pytest.mark.parametrize("P", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@few_or_many(5, 40)
def test_no_use_of_a_trainer_remembers_another(pool, P, programs):
    assert_programs(any_use, programs, partial(run_uses, pool, P), steps=3)

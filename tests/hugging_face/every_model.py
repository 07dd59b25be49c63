"""The ring in every causal language model of transformers: equal to one process, or refused with a reason.

    exact     the loss and every gradient of a small model with the attention of transformers, on one process
    apart     the same without the ring: each rank attends in its own chunk. It must differ, or nothing is proved
    ring      the same model after use_ring, on 2 and on 3 processes, zigzag; the parts of the ranks are summed

    $ python -m tests.hugging_face.every_model --only llama mistral
    $ python -m tests.hugging_face.every_model --write      all of them, and ringlab/hugging_face/EVERY_MODEL.md

One rule shrinks the default config of each model:

    sizes      a field of a config that counts something gets a small value, by its name
    layers     the kinds of layers of the default config, each once: full, window, linear, dense, experts, ...
    windows    shorter than the sequence, so that a ring without them is another function
    no chance  dropout, jitter and layer drop are 0
    weights    attention matters: normal with a standard deviation of 0.2, and norms between 0.5 and 1.5

All that transformers computes in float32, inside a model of another dtype, is computed in float64 here: see `Exactly`.

The page says what each outcome means.
"""

import argparse
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ringlab.hugging_face.batch import shard_batch, shifted
from ringlab.hugging_face.use import use_ring
from ringlab.models.mesh import ContextParallel
from ringlab.models.transformer import IGNORED, summed_loss
from ringlab.ring.layouts import positions
from ringlab.support.processes import LostRank, Raised, RankContext, Ranks

transformers.logging.set_verbosity_error()

NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SEED, S, REAL = 0, 24, 17  # the second of two sequences has 17 tokens, then padding
FIRST, VOCABULARY = 32, 96  # tokens are FIRST ... VOCABULARY - 1: none has a meaning of its own
DEPTH = 4  # layers, if the default config has as many kinds

# A field whose whole name is the pattern gets the value, or a smaller one that it has. The first pattern counts.
SIZES = {
    r".*vocab_size(_.*)?|vocab_offset|.*_vocab": VOCABULARY,
    r".*max_position.*|n_positions|n_ctx|max_seq_len|context_length|model_max_length|max_(source|target)_positions": 64,
    r"sliding_window(_size)?|attention_window_size|window_size|local_attention(_window_len)?|keep_window_size": 6,
    r"attention_chunk_size|mamba_chunk_size|chunk_size|block_size|(local|lsh)_attn_chunk_length": 8,
    r"(num_|n_)?(hidden_layers|layers?|blocks)|(num_)?(en|de)coder_layers|depth|num_layers_per_stack": 2,
    r".*(num_key_value|linear_num_key|kv_n|num_kv)_heads|(mamba_)?n_?groups": 2,
    r".*(attention|value|mamba|index|mamba_n|linear_num|index_n)_heads|(num|n)_heads?|num_query_groups": 4,
    r"topk_group": 1,
    r".*(experts?_per_tok(en)?|topk|top_k|moe_k|n_group|num_expert_group)": 2,
    r"(n|num|moe_num)_(local_|routed_)?experts|zero_expert_num": 4,
    r".*(intermediate|ffn|feed_forward|mlp_dim|d_ff|dff|n_inner|dim_ff|d_inner).*": 48,
    r"qk_rope_head_dim|v_head_dim|rotary_dim|index_head_dim": 8,
    r".*(head_dim|d_kv|d_head|kv_channels|head_size|dim_head|headdim)": 16,
    r".*(hidden_size|d_model|n_embd|emb_dim|embed_dim|embedding_dim|embedding_size|proj_dim|lru_width|d_ssm).*": 64,
    r".*(expand)": 1,
}
OTHER = 16  # the largest value of a field with another name

# Fields that a model needs and its default config leaves empty.
EMPTY = {"head_dim": 16, "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1}
EMPTY |= {"num_experts_per_tok": 2}

# By the type of a config: what its default lacks for a layer of each kind, or must fit together. As few as possible.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
    },
    "gemma4_text": {"global_head_dim": 24},
    "gemma4_unified_text": {"global_head_dim": 24},
    "qwen4_exp_text": {
        "head_dim": 16,
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4},
    },
    "reformer": {"axial_pos_shape": (4, 6), "axial_pos_embds_dim": (16, 48), "max_position_embeddings": 24},
    "xmod": {"default_language": "en_XX"},
    "longcat_flash": {"head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots3_note_text": {
        "sliding_window": 6,
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
        **{"swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 8},
    },
    "laguna": {"num_attention_heads_per_layer": [4, 4], "num_hidden_layers": 2},
}


WINDOW = {"layer_types": ["sliding_attention", "full_attention"]}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
FROM_20 = {"original_max_position_embeddings": 20}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, **FROM_20}
# What a default config leaves out. A limit of 20 tokens is more than a shard has, and less than the sequence has.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with yarn": ("llama", {"rope_parameters": YARN}),
    "llama with dynamic frequencies": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 20}),
    "phi3 with longrope": ("phi3", {"rope_parameters": LONGROPE, **FROM_20, "max_position_embeddings": 64}),
    "gemma3_text with dynamic frequencies": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": DEFAULT, "full_attention": DYNAMIC}, "max_position_embeddings": 20},
    ),
    "phimoe with longrope": (
        "phimoe",
        {"rope_parameters": {**LONGROPE, **FROM_20, "short_mscale": 1.0, "long_mscale": 1.3}},
    ),
    "ministral3 with temperatures": (
        "ministral3",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.5}},
    ),
    "gemma4_text with shared keys": (
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": 2 * WINDOW["layer_types"], "num_kv_shared_layers": 2},
    ),
    "granitemoehybrid of attention only": ("granitemoehybrid", {"layer_types": ["full_attention"] * 2}),
    "gpt_bigcode with all heads": ("gpt_bigcode", {"multi_query": False}),
    "opt without some layers": ("opt", {"layerdrop": 0.5}),
    "llama with dropout": ("llama", {"attention_dropout": 0.1}),
    "mistral with a window of 20": ("mistral", {"sliding_window": 20}),
    "llama4_text with chunks of 20": ("llama4_text", {"attention_chunk_size": 20, "floor_scale": 20}),
    "llama4_text with temperatures": ("llama4_text", {"floor_scale": 3, "attn_scale": 1.0}),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, **WINDOW}),
    "qwen3 with a window": ("qwen3", {"use_sliding_window": True, "sliding_window": 6, **WINDOW}),
    "laguna with a window": ("laguna", WINDOW),
    "starcoder2 with a window": ("starcoder2", {"sliding_window": 6}),
    "gemma3_text in both directions": ("gemma3_text", {"use_bidirectional_attention": True}),
    "bert as an encoder": ("bert", {"is_decoder": False}),
    "gpt2 with scales by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "mixtral with a loss of its router": ("mixtral", {"output_router_logits": True}),
    "lfm2 with a convolution": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "minimax_m3_vl_text with an index": (
        "minimax_m3_vl_text",
        {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4, "index_topk_blocks": 2},
    ),
    "falcon with ALiBi": ("falcon", {"alibi": True}),
    "mllama with cross-attention": ("mllama", {"cross_attention_layers": [1]}),
}


def small_config(cls: type[PreTrainedConfig], given: dict[str, Any], **changes: Any) -> PreTrainedConfig:
    """The default config of a class with `given` fields, all others shrunk by the rule; then `changes`."""
    default = cls(**given)
    stored = {field.name: cls.attribute_map.get(field.name, field.name) for field in fields(cls)}
    has = {name: vars(default)[as_name] for name, as_name in stored.items() if as_name in vars(default)}
    derived = {field.name for field in fields(cls) if field.default is None}  # a config derives them again
    small = {name: shrunk(name, x, default) for name, x in has.items()}
    small = {name: x for name, x in small.items() if name not in derived or isinstance(x, PreTrainedConfig)}
    small |= {name: EMPTY[name] for name in derived & EMPTY.keys() if has.get(name, ...) is None}
    own = {name: x for name, x in given.items() if not isinstance(has.get(name), PreTrainedConfig)}
    own |= {name: small_config(type(has[name]), given[name]) for name in given.keys() - own.keys()}
    return cls(**{**small, **layers(default), **own, **changes})


def shrunk(name: str, value: Any, config: PreTrainedConfig) -> Any:
    """The value of a field of a default config, made small by the field's name."""
    if isinstance(value, PreTrainedConfig):
        return small_config(type(value), EXCEPTIONS.get(value.model_type, {}))
    if isinstance(value, bool):
        return value or name == "is_decoder"
    if isinstance(value, (int, float)) and re.search("drop|jitter", name):
        return type(value)(0)
    if not isinstance(value, int):
        return value
    if re.fullmatch(r".*_(id|index)", name):  # of a token with a meaning: below FIRST, and not 0, 1 or 2
        return value if value < FIRST else 3 + sum(map(ord, name)) % (FIRST - 3)
    if name == "num_key_value_heads" and value == vars(config).get("num_attention_heads"):
        return 4  # some models need as many key heads as query heads
    limit = next((limit for pattern, limit in SIZES.items() if re.fullmatch(pattern, name)), OTHER)
    return min(value, limit)


def layers(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields that count layers, or say something of each: the first layer of each kind, DEPTH at most."""
    count = getattr(config, "num_hidden_layers", 0)
    of_each = {name: x for name, x in vars(config).items() if isinstance(x, (list, tuple)) and len(x) == count > 2}
    of_each = {name: x for name, x in of_each.items() if len(set(map(str, x))) < count}  # no list of indices
    if not of_each:
        return {}
    kinds = list(zip(*of_each.values(), strict=True))
    kept = sorted({kind: at for at, kind in reversed(list(enumerate(kinds)))}.values())[:DEPTH]
    kept = kept if len(kept) > 1 else [0, 0]
    own = "num_hidden_layers" if "num_hidden_layers" in vars(config) else config.attribute_map["num_hidden_layers"]
    return {own: len(kept), **{name: [x[at] for at in kept] for name, x in of_each.items()}}


def small_model(name: str) -> PreTrainedModel:
    """The model of a name in NAMES or VARIANTS, in float64, the same at every call inside `Exactly`."""
    name, changes = VARIANTS.get(name, (name, {}))
    config_class = CONFIG_MAPPING[name]
    model_class = AutoModelForCausalLM._model_mapping[config_class]
    if model_class.config_class in config_class.sub_configs.values():  # the model takes a config nested in this one
        config_class = model_class.config_class
    if "shared_kv_states" in inspect.signature(model_class.forward).parameters:
        raise ValueError("its forward needs shared_kv_states, the keys and values of another model")
    config = small_config(config_class, EXCEPTIONS.get(config_class.model_type, {}), **changes)
    torch.manual_seed(SEED)
    model = model_class._from_config(config, experts_implementation="eager")  # others: no float64
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.2)
        else:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model.to(torch.float64).train()


def batch_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Two sequences of 24 and 17 tokens, the second with padding, whose number is none of a token."""
    tokens = torch.randint(FIRST, VOCABULARY, (2, S), generator=torch.Generator().manual_seed(SEED))
    real = torch.arange(S) < torch.tensor([[S], [REAL]])
    padding = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    labels = tokens.masked_fill(~real, IGNORED)
    return {"input_ids": tokens.masked_fill(~real, padding), "attention_mask": real.long(), "labels": labels}


class Exactly(TorchFunctionMode):
    """Inside, what asks for float32 gets float64."""

    def __enter__(self) -> "Exactly":
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(torch.float32)
        super().__exit__(*error)

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return function(*args, **kwargs)


# What becomes of each -------------------------------------------------------------------------------------------------

TABLE = Path(__file__).parents[2] / "ringlab" / "hugging_face" / "EVERY_MODEL.md"
WORLDS = (2, 3)
SECONDS = 120.0  # for one model on the ranks of a ring
TOLERANCE = 1e-10  # of the norm: 24 tokens and a few layers in float64
TOLD_APART = 1e-3
OUTCOMES = ("equal", "refused", "not buildable", "unproven", "crashed", "wrong")  # the later, the worse
UNPACKED = "; packed documents: refused, since layers are not told of them"
Results = tuple[float, Tensor, bool]  # the loss, the gradient of all parameters, whether layers take documents


@dataclass(frozen=True)
class Outcome:
    """What came of a model: one of OUTCOMES, its errors, or a sentence."""

    kind: str
    loss: float = 0.0
    gradient: float = 0.0
    sentence: str = ""
    packs: bool = True


def gradient_of(model: PreTrainedModel) -> Tensor:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in weights])


def mean_loss(logits: Tensor, labels: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The sum over these labels, which are shifted, divided by the labels of the batch."""
    return summed_loss(logits, labels) / (shifted(batch["labels"]) != IGNORED).sum()


def exact(name: str) -> Results:
    """The loss of one process: the model's own. Of a model of images it needs images: then the loss of its logits."""
    model = small_model(name)
    batch = batch_of(model)
    tokens = {part: x for part, x in batch.items() if part != "labels"}
    try:
        loss = model(**batch, use_cache=False).loss
    except ValueError:
        loss = mean_loss(model(**tokens, use_cache=False).logits, shifted(batch["labels"]), batch)
    loss.backward()
    return loss.item(), gradient_of(model), True


def apart(name: str, world_size: int) -> Results:
    """The loss and the gradient if each rank attended in its own chunk, at its own positions."""
    model = small_model(name)
    batch, total = batch_of(model), 0.0
    numbered = [part for part in model.modules() if hasattr(part, "create_position_ids_from_input_ids")]
    first = numbered[0].padding_idx + 1 if numbered else 0  # RoBERTa and its kin count from there
    for rank in range(world_size):
        at = positions("zigzag", S, rank, world_size)
        tokens = batch["input_ids"][:, at]
        passed = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "position_ids": first + at[None]}
        loss = mean_loss(model(**passed, use_cache=False).logits, shifted(batch["labels"])[:, at], batch)
        loss.backward()
        total += loss.item()
    return total, gradient_of(model), True


def in_the_ring(name: str, where: ContextParallel | None = None) -> Results:
    """The loss and the gradient, summed over the ranks."""
    model = small_model(name)
    use_ring(model, where)
    loss = model(**shard_batch(batch_of(model), where)).loss
    loss.backward()
    results = torch.cat([loss.detach()[None], gradient_of(model)])
    dist.all_reduce(results)
    return results[0].item(), results[1:], model.ring[0].proved.packs


def on_rank(context: RankContext, step: Callable[..., Results], *args: str | int) -> Results | None:
    """What a process of the pool does. Only rank 0 sends its results back."""
    warnings.simplefilter("ignore")
    with Exactly():
        results = step(*args)
    return results if context.rank == 0 else None


class Processes:
    """A process by itself, for `exact` and `apart`, and those of a ring. They stay alive from model to model."""

    def __init__(self) -> None:
        self.alone, self.ring = Ranks(1, SECONDS), Ranks(max(WORLDS), SECONDS)

    def stop(self) -> None:
        self.alone.stop()
        self.ring.stop()


def outcome(name: str, processes: Processes, worlds: Sequence[int] = WORLDS) -> Outcome:
    """What comes of a model on each of these numbers of ranks: the worst."""
    right = answer(processes.alone, 1, exact, name)
    if isinstance(right, Outcome):
        return Outcome("not buildable", sentence=right.sentence)
    seen = [compared(name, world_size, right, processes) for world_size in worlds]
    return max(seen, key=lambda each: (OUTCOMES.index(each.kind), each.gradient))


def compared(
    name: str, world_size: int, right: Results, processes: Processes, step: Callable[[str], Results] = in_the_ring
) -> Outcome:
    """`step` on the ranks of a ring, beside the `right` results of one process."""
    given = answer(processes.ring, world_size, step, name)
    if isinstance(given, Outcome):
        return given
    loss, gradient = errors(given, right)
    if not max(loss, gradient) <= TOLERANCE:
        return Outcome("wrong", loss, gradient)
    other = answer(processes.alone, 1, apart, name, world_size)
    if isinstance(other, Outcome) or not max(errors(other, right)) >= TOLD_APART:
        return Outcome("unproven", loss, gradient)
    return Outcome("equal", loss, gradient, packs=given[2])


def answer(ranks: Ranks, world_size: int, step: Callable[..., Results], *args: str | int) -> Results | Outcome:
    """The results of a step, or an Outcome: refused if this package says why on every rank, else crashed."""
    try:
        first, *others = ranks.outcomes(world_size, on_rank, step, *args)
    except LostRank as lost:
        return Outcome("crashed", sentence=str(lost).strip().splitlines()[-1])
    raised = [each for each in (first, *others) if isinstance(each, Raised)]
    if not raised:
        return first
    same = len(raised) == world_size and len({each.message for each in raised}) == 1
    files = [re.findall(r'^  File "(.*)", line', each.trace, re.MULTILINE) for each in raised]
    ours = all("ringlab" in Path(of_each[-1]).parts for of_each in files)  # transformers raises ValueError too
    if same and ours and raised[0].kind in ("ValueError", "ImportError"):
        return Outcome("refused", sentence=raised[0].message)
    return Outcome("crashed", sentence=f"{raised[0].kind}: {raised[0].message}")


def errors(given: Results, right: Results) -> tuple[float, float]:
    """Of the loss and of the gradient, in the norm."""
    (loss, gradient, _), (right_loss, right_gradient, _) = given, right
    return abs(loss - right_loss) / abs(right_loss), ((gradient - right_gradient).norm() / right_gradient.norm()).item()


def sweep(names: Sequence[str]) -> Iterator[tuple[str, Outcome]]:
    processes = Processes()
    try:
        for name in names:
            yield name, outcome(name, processes)
    finally:
        processes.stop()


def said(outcome: Outcome) -> str:
    errors = f"loss {outcome.loss:.0e}, gradient {outcome.gradient:.0e}{'' if outcome.packs else UNPACKED}"
    return " ".join(outcome.sentence.split()) or errors


def page(found: dict[str, Outcome]) -> str:
    """The committed page with these outcomes in its tables. Its words stay."""
    counts, text = Counter(found[name].kind for name in NAMES), TABLE.read_text()
    for kind in OUTCOMES:
        text = re.sub(rf"(?m)^\| {kind} \| \d+ \|", f"| {kind} | {counts[kind]} |", text)
    models = "".join(f"{row(name, found[name], others(name, found))}\n" for name in NAMES)
    variants = "".join(f"{row(name, found[name])}\n" for name in VARIANTS)
    tables = iter((models, variants))
    return re.sub(r"(?<=\|---\|---\|---\|\n)(\|.*\n)+", lambda _: next(tables), text)


def others(name: str, found: dict[str, Outcome]) -> str:
    """The settings of a model with which another thing becomes of it."""
    own = {variant: found[variant].kind for variant in VARIANTS if variant.startswith(f"{name} ")}
    return "".join(f"; {variant[len(name) + 1 :]}: {kind}" for variant, kind in own.items() if kind != found[name].kind)


def row(name: str, outcome: Outcome, more: str = "") -> str:
    return f"| {name} | {outcome.kind} | {said(outcome).replace('|', chr(92) + '|')}{more} |"


def committed() -> dict[str, str]:
    """{name: outcome} of the committed table."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .* \|$", TABLE.read_text(), re.MULTILINE)
    return {name: kind for name, kind in rows if name in (*NAMES, *VARIANTS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*NAMES, *VARIANTS], default=[*NAMES, *VARIANTS])
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    args = parser.parse_args()
    if args.write and len(args.only) < len(NAMES) + len(VARIANTS):
        parser.error("--write needs all models; expected no --only")
    found = {}
    for name, found[name] in sweep(args.only):
        print(f"{found[name].kind:14}{name}: {said(found[name])}", flush=True)
    print(Counter(each.kind for each in found.values()))
    if args.write:
        TABLE.write_text(page(found))
    return 0 if not {"wrong", "crashed", "unproven"} & {each.kind for each in found.values()} else 1


if __name__ == "__main__":
    sys.exit(main())

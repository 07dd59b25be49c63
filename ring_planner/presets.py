"""Names in place of numbers: models by their configuration, GPUs by their data sheet and by what was measured on them.

    model_named("llama-3.1-8b"), model_named("folder/config.json"), gpu_named("h100")

A reader may skip this file: it reads presets.json and Hugging Face's config.json.

FLOP/s without sparsity; bytes/s in one direction; memory as torch reports it where `source` says so, else as printed.

Source: named in each row of the two files.
"""

import difflib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ring_planner.hidden_communication import AttentionLayer
from ring_planner.layers import Latents, LinearLayers
from ring_planner.round_costs import BANDWIDTH_SHARE, HOST_SHARE

GIB = 2**30
# The share of a kernel's FLOP/s that 64 numbers a head leave of 128, both ways: by hand on one H100, but for the best.
NARROW = {"fa2": (0.88, 0.93), "cudnn": (0.73, 0.84), "best": (0.73, 0.84)}


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. `feedforward` is the inner width of a gated feedforward: three matrices.

    With experts, a token uses `active` of the `experts` of each layer, and `shared` more that all tokens use, all of
    width `feedforward`. The first `dense` layers have none, but one feedforward of `dense_feedforward`. `gated`:
    attention's output is multiplied by a gate, whose projection is as wide as that of the queries. With `latents`
    attention is that of whole heads, whose `head_dim` is the mean of a key's and a value's. Raises ValueError for a
    model that cannot be.
    """

    name: str
    source: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feedforward: int
    vocab: int
    head_dim: int = 0  # 0: hidden / heads
    tied: bool = False  # one weight for the embedding and the head
    experts: int = 0
    active: int = 0
    shared: int = 0
    dense: int = 0
    dense_feedforward: int = 0
    gated: bool = False
    linear: LinearLayers | None = None
    latents: Latents | None = None

    def __post_init__(self) -> None:
        if self.latents:
            object.__setattr__(self, "head_dim", (self.latents.key + self.latents.rope + self.latents.value) // 2)
        if not self.head_dim:
            if 0 < self.heads <= self.hidden and self.hidden % self.heads:
                given = f"hidden is {self.hidden}, heads {self.heads}"
                raise ValueError(f"{given}; expected hidden to be a multiple, or a config.json with head_dim")
            object.__setattr__(self, "head_dim", self.hidden // max(1, self.heads))
        for name in ("layers", "hidden", "heads", "kv_heads", "feedforward", "vocab", "head_dim", "experts", "shared"):
            least, most = int(name not in ("experts", "shared")), 10**4 if "heads" in name else 10**8
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more, {most:,} at most")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, kv_heads {self.kv_heads}; expected heads to be a multiple")
        if not 0 <= self.active <= self.experts or bool(self.active) != bool(self.experts):
            raise ValueError(f"active is {self.active} of {self.experts} experts; expected 1 to {self.experts}")
        if not 0 <= self.dense <= self.layers or (self.dense and not self.dense_feedforward):
            given = f"dense is {self.dense} of {self.layers} layers, dense_feedforward {self.dense_feedforward}"
            raise ValueError(f"{given}; expected 0 to {self.layers} layers, and the width of their feedforward")
        if self.linear and not (min(vars(self.linear).values()) > 0 and self.linear.layers < self.layers):
            raise ValueError(f"{self.linear} of {self.layers} layers; expected 1 or more of each, and fewer layers")

    def attention(self, itemsize: int = 2) -> AttentionLayer:
        """The attention of a layer."""
        return AttentionLayer(self.heads, self.kv_heads, self.head_dim, itemsize)

    @property
    def softmax_layers(self) -> int:
        """The layers whose attention has keys and values."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def projections(self) -> int:
        """Weights of W_q, W_k, W_v and W_o, and of what stands in their place in linear layers, of all layers."""
        each = self.hidden * ((2 + self.gated) * self.heads + 2 * self.kv_heads) * self.head_dim
        if self.latents:
            each = self.latents.projections(self.hidden, self.heads)
        of_linear = self.linear.layers * self.linear.projections(self.hidden) if self.linear else 0
        return self.softmax_layers * each + of_linear

    def feedforwards(self, *, active: bool) -> int:
        """Weights of the feedforwards of all layers: those that a token uses, or all."""
        sparse = self.layers - self.dense
        experts = self.active if active else self.experts
        each = experts + self.shared if self.experts else 1
        router = self.hidden * self.experts
        dense = 3 * self.hidden * self.dense_feedforward * self.dense
        return sparse * (3 * self.hidden * self.feedforward * each + router) + dense

    @property
    def matrices(self) -> int:
        """Weights of all layers that a token is multiplied by; the head is not counted."""
        return self.projections + self.feedforwards(active=True)

    @property
    def outside(self) -> int:
        """Parameters outside the layers: the embedding, the head, the last norm."""
        return (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    def parameters(self, *, active: bool = False) -> int:
        """All parameters, or those that a token uses, but for biases, convolutions and the norms inside attention."""
        return self.projections + 2 * self.layers * self.hidden + self.feedforwards(active=active) + self.outside

    @property
    def inner(self) -> int:
        """The numbers of a token inside a layer's feedforward, on an average."""
        sparse = self.feedforward * (self.active + self.shared if self.experts else 1)
        return (sparse * (self.layers - self.dense) + self.dense_feedforward * self.dense) // self.layers


@dataclass(frozen=True)
class GPU:
    """A GPU and its links. Rates in FLOP/s and bytes/s, one way.

    `attention`: FLOP/s of a kernel on infinitely many blocks, forward and backward, for the visible pairs and 128
    numbers a head: "fa2", FlashAttention 2; "cudnn"; "best", FlashAttention 3 or 4. The last one listed is the best.
    `multiprocessors`: of the chip, from NVIDIA's architecture papers (B200: its number of cores / 128); 0: not known.
    """

    name: str
    source: str
    peak: dict[str, float] = field(hash=False)  # of matrix products, by dtype, without sparsity
    attention: dict[str, tuple[float, float]] = field(hash=False)
    memory: float  # bytes
    memory_bandwidth: float
    bandwidth: float  # of its link to other GPUs of the host
    host_bandwidth: float  # of its share of the NICs
    multiprocessors: int = 0
    nics: int = 0  # of a host; 0: one for each GPU
    host_share: float = HOST_SHARE  # of the NIC's bytes/s: what a message to another host reaches; collectives: more
    bandwidth_share: float = BANDWIDTH_SHARE  # of the link's bytes/s
    own: bool = False  # attention's FLOP/s are those that your kernel reaches: no framework's factor comes on top

    @property
    def ideal(self) -> bool:
        return math.isinf(self.memory_bandwidth)

    @property
    def kernel(self) -> str:
        """What PyTorch takes, and so what use_ring runs."""
        return "cudnn" if "cudnn" in self.attention else "fa2"

    def rates(self, kernel: str, head_dim: int) -> tuple[float, float]:
        """FLOP/s of a kernel, or of the best, forward and backward, with heads of `head_dim` numbers."""
        kernel = kernel if kernel in self.attention else [*self.attention][-1]
        (forward, backward), (at_64, back_at_64) = self.attention[kernel], NARROW[kernel]
        halved = 0.0 if self.ideal else max(0.0, math.log2(128 / head_dim))
        return forward * at_64**halved, backward * back_at_64**halved


KNOWN = json.loads(Path(__file__).with_name("presets.json").read_text())
PARTS = {"linear": LinearLayers, "latents": Latents}
MODELS = {
    row["name"]: Model(**{name: PARTS[name](**value) if name in PARTS else value for name, value in row.items()})
    for row in KNOWN["models"]
}
GPUS = {row["name"]: GPU(**row) for row in KNOWN["gpus"]}
GPUS["a100"] = GPUS["a100-80"]


def unknown(what: str, name: str, known: Collection[str], more: str = "") -> ValueError:
    """No preset has this name; the one that was meant, if its name is near."""
    near = [f", did you mean {it}" for it in difflib.get_close_matches(name.lower().replace(" ", "-"), known, 1)]
    return ValueError(f"{what} is {name!r}{''.join(near)}; expected {more}one of {', '.join(known)}")


def gpu_named(name: str) -> GPU:
    """A GPU by its name, with or without spaces. Raises ValueError that lists all, if there is none."""
    known = name.lower().replace(" ", "-")
    if known not in GPUS:
        raise unknown("gpu", name, GPUS)
    return GPUS[known]


def model_named(name: str) -> Model:
    """A model by its name, its config.json or the folder of that. Raises ValueError as `gpu_named`, `read_config`."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    if name and Path(name).is_dir():
        name = f"{name}/config.json"
    if not name.endswith(".json"):
        raise unknown("model", name, MODELS, "a config.json, its folder, or ")
    return read_config(Path(name))


FIELDS = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size"}
HYBRID = "a hybrid of attention and layers that are not counted; expected full_attention and linear_attention"
UNLIKE = {  # fields of config.json, and what they say of a model that Model does not describe
    "compress_rates": "attention to compressed keys; expected a key and a value of each token",
    "interleave_moe_layer_step": "experts of two widths, in some layers; expected the same in all layers",
    "mlp_only_layers": "experts in some layers only; expected them in all layers after the first dense ones",
    "attention_chunk_size": "attention in pieces; expected every token to see all before it",
    **dict.fromkeys(("attn_layer_period", "hybrid_override_pattern", "attn_layer_indices", "attn_type_list"), HYBRID),
    **dict.fromkeys(("linear_attn_config", "ssm_cfg", "mamba_d_state", "block_types"), HYBRID),
}
LINEAR = {  # the fields of a gated delta rule
    "heads": "linear_num_value_heads",
    "key_heads": "linear_num_key_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
LATENTS = {  # the fields of latent attention, and of an index
    "rank": "kv_lora_rank",
    "rope": "qk_rope_head_dim",
    "key": "qk_nope_head_dim",
    "value": "v_head_dim",
    "q_rank": "q_lora_rank",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_keys": "index_topk",
}
GATED = ("qwen3_next", "qwen3_5")  # model types, by their beginning, whose attention has a gate
TWO_MATRICES = ("bert", "gpt_neox", "nemotron", "phi", "roberta", "starcoder2")  # model types, by their code
TIED = ("cohere", "cohere2", "gemma", "gemma2", "gemma3_text")  # unless config.json says otherwise


def refuse_unlike(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a config.json of a model that `Model` does not describe."""
    for name, says in UNLIKE.items():
        if config.get(name) and not (name == "attn_type_list" and set(str(config[name])) <= {*"[1, ]"}):  # 1: softmax
            raise ValueError(f"{path} has {name}: {says}")
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        given = f"{path} has sliding_window {config['sliding_window']}"
        raise ValueError(f"{given}; expected null: every token sees all before it. Write null to plan an upper bound")
    if (config.get("decoder_sparse_step") or 1) != 1:
        raise ValueError(f"{path} has decoder_sparse_step: {UNLIKE['mlp_only_layers']}")
    kinds, delta = config.get("layer_types") or [], all(map(config.get, LINEAR.values()))
    known = ["full_attention", "linear_attention"] if delta else ["full_attention"]
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        more = "" if delta else f"; linear_attention only with {', '.join(LINEAR.values())}"
        raise ValueError(f"{path} has layer_types {kinds}; expected {' or '.join(known)} only{more}")
    if delta and not kinds and not config.get("full_attention_interval"):
        raise ValueError(f"{path} has linear_num_value_heads and no layer_types; expected the kind of each layer")
    if config.get("model_type") in TWO_MATRICES:
        given = f"{path} has model_type {config['model_type']}: a feedforward of two matrices"
        raise ValueError(f"{given}; expected a gated feedforward, of three")


def read_config(path: Path) -> Model:
    """A Model from the config.json of a model on the Hugging Face hub.

    Raises ValueError if the file cannot be read, lacks a field, or is of a kind of attention that is not counted here.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as reason:
        raise ValueError(f"{path} cannot be read: {reason}; expected the config.json of a model") from reason
    if isinstance(config, dict):
        config = config.get("text_config") or config  # of a model that sees pictures too
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {str(config)[:40]!r}; expected an object with the fields of a model")
    refuse_unlike(path, config)

    def field(*names: str, default: int | None = None) -> int:
        found = [config[name] for name in names if config.get(name) is not None]
        if not found and default is None:
            raise ValueError(f"{path} has no field {' or '.join(names)}; add it: it counts the model's work")
        value = found[0] if found else default
        if type(value) is not int or value < 0:
            raise ValueError(f"{path}: {names[0]} is {value!r}; expected a whole number")
        return value

    known: dict[str, Any] = {name: field(given) for name, given in FIELDS.items()}
    kind = str(config.get("model_type") or path.parent.name)
    every = field("full_attention_interval", default=1) or 1  # 1: every layer has full attention
    kinds = config.get("layer_types")
    linear = kinds.count("linear_attention") if kinds else known["layers"] - known["layers"] // every
    if linear:
        known["linear"] = LinearLayers(linear, **{name: field(given) for name, given in LINEAR.items()})
    experts = field("num_local_experts", "num_experts", "n_routed_experts", default=0)
    names = ["intermediate_size", "moe_intermediate_size"] if experts else ["intermediate_size"]
    width = field(*names)
    if experts:
        dense, of_dense = field("first_k_dense_replace", default=0), width
        width = max(1, field("moe_intermediate_size", default=width))
        wide = field("shared_expert_intermediate_size", default=0)
        if wide % width:
            raise ValueError(f"{path} has shared_expert_intermediate_size {wide}; expected a multiple of {width}")
        known |= {"experts": experts, "active": field("num_experts_per_tok"), "dense": dense}
        known |= {"shared": wide // width or field("n_shared_experts", default=0)}
        known |= {"dense_feedforward": of_dense if dense else 0}
    known |= {"name": kind, "source": str(path), "feedforward": width, "gated": kind.startswith(GATED)}
    known["kv_heads"] = field("num_key_value_heads", default=known["heads"])
    known["head_dim"] = field("head_dim", default=0)
    if config.get("kv_lora_rank"):
        sizes = {name: field(given, default=getattr(Latents, name, None)) for name, given in LATENTS.items()}
        known |= {"latents": Latents(**sizes), "kv_heads": known["heads"]}
    return Model(**known, tied=config.get("tie_word_embeddings", kind in TIED) is True)

"""Names in place of numbers: models by their configuration, GPUs by their data sheet and by what was measured on them.

    model_named("llama-3.1-8b"), model_named("folder/config.json"), gpu_named("h100")

A reader may skip this file: it holds two tables, and a reader of Hugging Face's config.json.

Shapes: numbers only. FLOP/s without sparsity; bytes/s in one direction; bytes of memory as torch reports them, where
`source` says so, else as printed on the data sheet.

Before: ring_memory.py. After: whole_step.py, which predicts a training step from them.
Source: named in each row.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ringlab.planning.hidden_communication import AttentionLayer
from ringlab.planning.round_costs import CARD_SHARE, unlimited

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. `feedforward` is the inner width of a gated feedforward: three matrices.

    With experts, a token uses `active` of the `experts` of each layer, and `shared` more that all tokens use, all of
    width `feedforward`. The first `dense` layers have none, but one feedforward of `dense_feedforward`.
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

    def __post_init__(self) -> None:
        """Raises ValueError for a model that cannot be."""
        if not self.head_dim:
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
            raise ValueError(
                f"dense is {self.dense} of {self.layers} layers, dense_feedforward {self.dense_feedforward}; "
                f"expected 0 to {self.layers} layers, and the width of their feedforward"
            )

    def attention(self, itemsize: int = 2) -> AttentionLayer:
        """The attention of a layer."""
        return AttentionLayer(self.heads, self.kv_heads, self.head_dim, itemsize)

    @property
    def projections(self) -> int:
        """Weights of W_q, W_k, W_v and W_o of a layer."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    def feedforwards(self, *, active: bool) -> int:
        """Weights of the feedforwards of all layers: those that a token uses, or all."""
        sparse = self.layers - self.dense
        each = (self.active if active else self.experts) + self.shared if self.experts else 1
        router = self.hidden * self.experts
        return sparse * (3 * self.hidden * self.feedforward * each + router) + self.dense * (
            3 * self.hidden * self.dense_feedforward
        )

    @property
    def matrices(self) -> int:
        """Weights of all layers that a token is multiplied by; the head is not counted."""
        return self.layers * self.projections + self.feedforwards(active=True)

    @property
    def outside(self) -> int:
        """Parameters outside the layers: the embedding, the head, the last norm."""
        return (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    def parameters(self, *, active: bool = False) -> int:
        """All parameters, or those that a token uses. Biases, and norms of queries and keys, are left out."""
        return self.layers * (self.projections + 2 * self.hidden) + self.feedforwards(active=active) + self.outside

    @property
    def inner(self) -> int:
        """The numbers of a token inside a layer's feedforward, on an average."""
        sparse = self.feedforward * (self.active + self.shared if self.experts else 1)
        return (sparse * (self.layers - self.dense) + self.dense_feedforward * self.dense) // self.layers


HUB = "config.json of the model on the Hugging Face hub: "
_MODELS = (  # layers, hidden, heads, kv_heads, feedforward, vocab
    Model("llama-3.1-8b", "Llama 3, arXiv 2407.21783, table 3", 32, 4096, 32, 8, 14336, 128256),
    Model("llama-3.1-70b", "Llama 3, arXiv 2407.21783, table 3", 80, 8192, 64, 8, 28672, 128256),
    Model("llama-3.1-405b", "Llama 3, arXiv 2407.21783, table 3", 126, 16384, 128, 8, 53248, 128256),
    Model("llama-3.2-1b", HUB + "meta-llama/Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128256, tied=True),
    Model("llama-3.2-3b", HUB + "meta-llama/Llama-3.2-3B", 28, 3072, 24, 8, 8192, 128256, tied=True),
    Model("llama-2-7b", HUB + "meta-llama/Llama-2-7b-hf", 32, 4096, 32, 32, 11008, 32000),
    Model("llama-2-13b", HUB + "meta-llama/Llama-2-13b-hf", 40, 5120, 40, 40, 13824, 32000),
    Model("llama-2-70b", HUB + "meta-llama/Llama-2-70b-hf", 80, 8192, 64, 8, 28672, 32000),
    Model("mistral-7b", HUB + "mistralai/Mistral-7B-Instruct-v0.2", 32, 4096, 32, 8, 14336, 32000),
    Model("qwen2.5-7b", HUB + "Qwen/Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064),
    Model("qwen2.5-72b", HUB + "Qwen/Qwen2.5-72B", 80, 8192, 64, 8, 29568, 152064),
    Model("qwen3-8b", HUB + "Qwen/Qwen3-8B", 36, 4096, 32, 8, 12288, 151936),
    Model(
        "qwen3-30b-a3b", HUB + "Qwen/Qwen3-30B-A3B", 48, 2048, 32, 4, 768, 151936, head_dim=128, experts=128, active=8
    ),
    Model("mixtral-8x7b", HUB + "mistralai/Mixtral-8x7B-v0.1", 32, 4096, 32, 8, 14336, 32000, experts=8, active=2),
    Model("mixtral-8x22b", HUB + "mistralai/Mixtral-8x22B-v0.1", 56, 6144, 48, 8, 16384, 32000, experts=8, active=2),
    Model(
        "deepseek-moe-16b",
        HUB + "deepseek-ai/deepseek-moe-16b-base",
        *(28, 2048, 16, 16, 1408, 102400),
        experts=64,
        active=6,
        shared=2,
        dense=1,
        dense_feedforward=10944,
    ),
)
MODELS = {model.name: model for model in _MODELS}


@dataclass(frozen=True)
class GPU:
    """A GPU and its links. Rates in FLOP/s and bytes/s, one way.

    `attention`: FLOP/s of a kernel on infinitely many blocks, (forward, backward), counted for the visible pairs only:
    `fused` is the kernel that is written for the GPU; `torch` is what torch's scaled_dot_product_attention runs.
    `multiprocessors`: of the chip, from NVIDIA's architecture papers (B200: its number of cores / 128); 0: not known.
    """

    name: str
    source: str
    peak: dict[str, float]  # of matrix products, by dtype, without sparsity
    attention: dict[str, tuple[float, float]]  # "fused", "torch"
    memory: float  # bytes
    memory_bandwidth: float
    link: float  # to other GPUs of the host
    card: float  # a NIC for each GPU
    multiprocessors: int = 0
    card_share: float = CARD_SHARE  # of the card's bytes/s: what a message to another host reaches; collectives: more


def scaled(rates: tuple[float, float], by: float) -> tuple[float, float]:
    """The rates of a kernel on a chip that computes `by` times as fast."""
    return by * rates[0], by * rates[1]


FA2 = "FlashAttention 2 of zhuzilin's README, 1 GPU"
# zhuzilin/ring-flash-attention, README: FlashAttention 2 on one GPU, causal, S = 8,192, 32 heads.
A100 = unlimited((205e12, 174e12), 32, 8192, 108, causal=True)
H800 = unlimited((325e12, 288e12), 32, 8192, 132, causal=True)  # its chip is that of the H100
H100 = (680e12, 586e12)  # MagiAttention's documentation: its kernel on one H100, causal, S = 65,536: all waves are full
HOPPER, AMPERE = {"fused": H100, "torch": H800}, {"fused": A100, "torch": A100}
SHEET = "NVIDIA data sheet; memory: torch's out-of-memory messages; attention: "
_GPUS = (
    GPU(
        "h100",
        SHEET + "MagiAttention, " + FA2,
        {"bf16": 989e12, "fp8": 1979e12},
        HOPPER,
        *(79.1 * GIB, 3.35e12, 450e9, 50e9, 132),
    ),
    GPU(  # arXiv 2411.01783: a peak of 800 TFLOP/s, 540 for FlashAttention 3. FlashAttention 2: in proportion
        "h100-500w",
        "Grand Teton hosts: HBM2e of 96 GB, 500 W: torchtitan llama3_h100_202412; arXiv 2411.01783, section 4",
        {"bf16": 800e12, "fp8": 1600e12},
        {"fused": scaled(H100, 540 / 680), "torch": scaled(H800, 800 / 989)},
        *(96e9, 2.4e12, 450e9, 50e9, 132, 0.566),  # the last is fitted on three hops: arXiv 2411.01783, table 5
    ),
    GPU("h200", SHEET + "as the H100", {"bf16": 989e12, "fp8": 1979e12}, HOPPER, 139.7 * GIB, 4.8e12, 450e9, 50e9, 132),
    GPU("h800", SHEET + "as the H100", {"bf16": 989e12, "fp8": 1979e12}, HOPPER, 79.1 * GIB, 3.35e12, 200e9, 50e9, 132),
    GPU("a100-80", SHEET + FA2, {"bf16": 312e12}, AMPERE, 79.1 * GIB, 2.04e12, 300e9, 25e9, 108),
    GPU("a100-40", SHEET + FA2, {"bf16": 312e12}, AMPERE, 39.5 * GIB, 1.56e12, 300e9, 25e9, 108),
    GPU(
        "b200",
        "NVIDIA data sheet of DGX B200; attention: the H100's share of the peak, not measured",
        {"bf16": 2250e12, "fp8": 4500e12},
        {"fused": scaled(H100, 2250 / 989), "torch": scaled(H800, 2250 / 989)},
        *(180e9, 7.7e12, 900e9, 50e9, 148),
    ),
    GPU(
        "l40s",
        "NVIDIA data sheet; PCIe 4.0 x16; attention: the A100's share of the peak, not measured; card of 100 Gbit/s",
        {"bf16": 362e12, "fp8": 733e12},
        dict.fromkeys(("fused", "torch"), scaled(A100, 362 / 312)),
        *(48e9, 0.864e12, 32e9, 12.5e9, 142),
    ),
)
GPUS = {gpu.name: gpu for gpu in _GPUS} | {"a100": _GPUS[4]}
A800 = "NVIDIA data sheet: an A100 with NVLink of 400 GB/s, both ways; attention: as the A100"
GPUS["a800"] = replace(GPUS["a100-80"], name="a800", source=A800, link=200e9)

Preset = TypeVar("Preset")


def named(kind: str, name: str, presets: Mapping[str, Preset]) -> Preset:
    """The preset of a name, in small or large letters. Raises ValueError that lists all, if there is none."""
    if name.lower() not in presets:
        raise ValueError(f"{kind} is {name!r}; expected one of {', '.join(presets)}")
    return presets[name.lower()]


def chip(name: str) -> GPU | None:
    """The GPU whose name begins this one, in small or large letters: "A100-SXM4-80GB" is an A100. None: unknown."""
    return next((gpu for known, gpu in sorted(GPUS.items()) if name.lower().startswith(known)), None)


def gpu_named(name: str) -> GPU:
    """A GPU by its name. Raises ValueError as `named`."""
    return named("gpu", name, GPUS)


def model_named(name: str) -> Model:
    """A model by its name, or by the path of its config.json. Raises ValueError as `named` and `read_config`."""
    if name.endswith(".json"):
        return read_config(Path(name))
    return named("model", name, MODELS)


FIELDS = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size"}


UNLIKE = {  # fields of config.json, and what they say of a model that Model does not describe
    "kv_lora_rank": "latent attention; expected keys and values of whole heads",
    "shared_expert_intermediate_size": "experts of two widths; expected one width",
    "interleave_moe_layer_step": "experts of two widths, in some layers; expected the same in all layers",
    "mlp_only_layers": "experts in some layers only; expected them in all layers after the first dense ones",
    "attention_chunk_size": "attention in pieces; expected every token to see all before it",
    "attn_layer_period": "layers without attention; expected attention in all layers",
}
TWO_MATRICES = ("bert", "gpt_neox", "nemotron", "phi", "roberta", "starcoder2")  # model types, by their code
TIED = ("cohere", "cohere2", "gemma", "gemma2", "gemma3_text")  # unless config.json says otherwise


def refuse_unlike(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a config.json of a model that `Model` does not describe."""
    for name, says in UNLIKE.items():
        if config.get(name):
            raise ValueError(f"{path} has {name}: {says}")
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise ValueError(
            f"{path} has sliding_window {config['sliding_window']}; expected null: every token sees all before it. "
            "Write null to plan for that: an upper bound"
        )
    if (config.get("decoder_sparse_step") or 1) != 1:
        raise ValueError(f"{path} has decoder_sparse_step: {UNLIKE['mlp_only_layers']}")
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"{path} has layer_types {kinds}; expected full_attention only")
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
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}; expected an object with the fields of a model")
    config = config.get("text_config") or config  # of a model that sees pictures too
    if not isinstance(config, dict):
        raise ValueError(f"{path}: text_config is {config!r}; expected an object with the fields of a model")
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
    experts = field("num_local_experts", "num_experts", "n_routed_experts", default=0)
    width, dense = field("intermediate_size"), 0
    if experts:
        dense = field("first_k_dense_replace", default=0)
        known |= {"experts": experts, "active": field("num_experts_per_tok"), "dense": dense}
        known |= {"shared": field("n_shared_experts", default=0), "dense_feedforward": width if dense else 0}
    return Model(
        name=str(config.get("model_type") or path.parent.name),
        source=str(path),
        kv_heads=field("num_key_value_heads", default=known["heads"]),
        head_dim=field("head_dim", default=0),
        feedforward=field("moe_intermediate_size", default=width) if experts else width,
        tied=config.get("tie_word_embeddings", config.get("model_type") in TIED) is True,
        **known,
    )

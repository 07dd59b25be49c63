"""Models of transformers with linear layers, unchanged, in a ring of states: loss and gradients of one process."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.extras import MISSING

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from ringlab import shard_batch, stop_ring, use_ring  # noqa: E402
from ringlab.models import hugging_face_states as states  # noqa: E402
from ringlab.models.hugging_face_states import CONVOLUTION, KDA, RULE, SCAN  # noqa: E402

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KIMI = {"linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense"] * 4, "num_key_value_heads": 4}
KIMI |= {"layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"], "pad_token_id": 0}
KIMI |= {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 1}
MAMBA |= {"attn_layer_indices": [2], "mamba_chunk_size": 8, "time_step_limit": (0.1, 1.5)}
KINDS = {  # three linear layers and one of attention
    "Qwen3Next": ("Config", DELTA | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Qwen3_5": ("TextConfig", DELTA),
    "OlmoHybrid": ("Config", DELTA | {"linear_num_key_heads": 4, "pad_token_id": 0, "eos_token_id": 1}),
    "Lfm2": ("Config", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "KimiLinear": ("Config", KIMI),
    "Bamba": ("Config", MAMBA),
}
IDS = torch.randint(32, 64, (2, 24), generator=torch.Generator().manual_seed(1))
DOCUMENTS = [5, 1, 18]


def model(kind):
    torch.manual_seed(0)
    config, more = KINDS[kind]
    config = getattr(transformers, kind + config)(**{**SIZES, **more})
    each = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    for name, weight in each.named_parameters():
        if name.endswith("A_log"):
            weight.data.fill_(-3)  # states that are kept for many tokens: else nothing would cross a border
        if name.endswith("mamba.in_proj.weight"):
            weight.data *= 20  # states are large beside what a token reads of itself
    return each


def results(each, loss):
    loss.backward()
    return loss.detach().clone(), torch.cat([x.grad.flatten() for x in each.parameters() if x.grad is not None])


@cache
def alone(kind):
    """On one process, each document alone."""
    each = model(kind)
    parts = IDS.split(DOCUMENTS, dim=1)
    labels = [2 * (part.shape[1] - 1) for part in parts]
    losses = [each(input_ids=x, labels=x).loss * n for x, n in zip(parts, labels, strict=True) if n]
    return results(each, sum(losses) / sum(labels))


def in_ring(context, kind, layout, mistake=None):
    each = model(kind)
    use_ring(each, layout=layout)
    if mistake:
        states.spread(each, MISTAKES[mistake](each))
    batch = {"input_ids": IDS, "labels": IDS}
    batch["position_ids"] = torch.cat([torch.arange(n) for n in DOCUMENTS]).expand(2, -1)
    found = results(each, each(**shard_batch(batch, layout=layout)).loss)
    for x in found:
        dist.all_reduce(x)
    stop_ring(each)
    assert not any("forward" in vars(part) for part in each.modules())
    return found


def off(found, right):
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, right, strict=True))


ROUNDING = 1e-5  # both compute in float32: about 100 roundings of 1.2e-7 in a row


@pytest.mark.parametrize(("kind", "P", "layout"), [(k, 3, "zigzag") for k in KINDS] + [("Qwen3_5", 4, "contiguous")])
def test_a_hybrid_model_in_the_ring_is_that_of_one_process(ranks, kind, P, layout):
    """Packed documents; one text: tests/models/every_model.py."""
    for found in ranks(P, in_ring, kind, layout):
        assert off(found, alone(kind)) < ROUNDING


MISTAKES = {
    "its own convolution": lambda each: states.in_ring(each.ring[0]) | {CONVOLUTION: states.ALONE[CONVOLUTION]},
    "its own rule": lambda each: states.in_ring(each.ring[0]) | {x: states.ALONE[x] for x in (RULE, KDA, SCAN)},
}
SICK = [("its own convolution", "Qwen3_5"), *(("its own rule", kind) for kind in ("Qwen3_5", "KimiLinear", "Bamba"))]


@pytest.mark.parametrize(("mistake", "kind"), SICK)
def test_a_layer_that_stays_in_its_shard_is_seen(ranks, mistake, kind):
    for found in ranks(3, in_ring, kind, "zigzag", mistake):
        assert off(found, alone(kind)) > 100 * ROUNDING

"""Every causal language model of transformers: in the ring it is one process's own, or a refusal says why not."""

import inspect
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from types import FunctionType
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.concepts import MISSING

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from ringlab import shard_batch, stop_ring, use_ring  # noqa: E402
from ringlab.hugging_face import attention as hugging_face_attention  # noqa: E402
from ringlab.models.mesh import ContextParallel  # noqa: E402
from ringlab.ring.latent_ring import LatentRing  # noqa: E402
from tests.hugging_face import every_model  # noqa: E402
from tests.hugging_face.hugging_face_models import errors  # noqa: E402

SOME = {
    "gemma3_text": "equal",  # a window in some layers
    "gpt_oss": "equal",  # learned sinks, experts
    "deepseek_v3": "equal",  # v with a head dimension of its own
    "opt": "equal",  # positions that the model counts by itself
    "phi3 with longrope": "equal",  # frequencies by the longest position
    "doge": "attention_mask is a tensor",
    "bloom": "takes no position_ids",
    "jamba": "JambaMambaMixer) of JambaForCausalLM mixes tokens",
    "lfm3": "equal",  # convolutions
    "deepseek_v4": "has a DeepseekV4Indexer, which chooses keys by a rule of its own",
    "qwen4_exp_text": "Qwen4ExpTextQSAIndexer chooses keys by another rule",
    "codegen": "does not ask AttentionInterface",
}


@pytest.fixture(scope="module")
def processes():
    both = every_model.Processes()
    yield both
    both.stop()


@pytest.mark.parametrize(("name", "expected"), SOME.items(), ids=SOME)
def test_a_model_of_each_kind(processes, name, expected):
    found = every_model.outcome(name, processes, worlds=(3,))
    if expected == "equal":
        assert found.kind == "equal", found
    else:
        assert (found.kind, expected in found.sentence) == ("refused", True), found
    assert every_model.committed()[name] == found.kind


# The comparison itself can fail ------------------------------------------------------------------------------------


def no_window(name):
    def dropped(*args, **passed):
        return ring(*args, **{**passed, "window": None})

    ring = hugging_face_attention.ring_flash_attention
    with mock.patch.object(hugging_face_attention, "ring_flash_attention", dropped):
        return every_model.in_the_ring(name)


def an_error_of_transformers(name):
    return every_model.small_model(name).set_attn_implementation("an attention that nobody has registered")


def another_error_on_a_rank(name):
    raise ValueError(f"rank {dist.get_rank()} refuses")


WRONG = [
    ("mistral", no_window, "wrong"),
    ("llama", an_error_of_transformers, "crashed"),
    ("llama", another_error_on_a_rank, "crashed"),
]


@pytest.mark.parametrize(("name", "step", "expected"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_a_mistake_is_not_equal(processes, name, step, expected):
    right = every_model.answer(processes.alone, 1, every_model.exact, name)
    assert every_model.compared(name, 3, right, processes, step).kind == expected


def test_equal_without_the_ring_proves_nothing(processes):
    right = every_model.answer(processes.alone, 1, every_model.exact, "llama")
    with mock.patch.object(every_model, "TOLD_APART", 10.0):
        assert every_model.compared("llama", 2, right, processes).kind == "unproven"


# Latents in place of K and V ------------------------------------------------------------------------------------------


def sending_latents(name, layout):
    with mock.patch.object(hugging_face_attention, "ring_flash_attention", None):  # no K and V travel
        return every_model.in_the_ring(name, ContextParallel(None, layout, LatentRing))


@pytest.mark.parametrize(
    ("name", "P", "layout"),
    [
        ("deepseek_v3", 2, "contiguous"),
        ("deepseek_v32", 3, "zigzag"),  # chosen keys
    ],
)
def test_a_model_whose_latents_travel_is_that_of_one_process(processes, name, P, layout):
    right = every_model.answer(processes.alone, 1, every_model.exact, name)
    found = every_model.compared(name, P, right, processes, partial(sending_latents, layout=layout))
    assert found.kind == "equal", found


class Twice(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def other_values(layer):
    own = type(layer)
    layer.__class__ = type("Other", (own,), {"expand_kv": lambda it, c, rope: own.expand_kv(it, 2 * c, rope)})


def own_expand(layer):
    layer.expand_kv = partial(type(layer).expand_kv, layer)


def adapted(layer):
    layer.kv_b_proj.__class__ = Twice


def clamped(*passed):
    return passed[-1].clamp(-0.5, 0.5) if isinstance(passed[-1], torch.Tensor) else None


def biased(layer):
    layer.kv_b_proj.bias = torch.nn.Parameter(torch.ones(1))


def hooked(kind, layer):
    getattr(layer.kv_b_proj, f"register_{kind}_hook")(clamped)


def by_another_name(layer):
    own = inspect.unwrap(type(layer).forward)
    names = tuple(name.replace("expand_kv", "expand_all") for name in own.__code__.co_names)
    layer.expand_all = partial(type(layer).expand_kv, layer)
    layer.forward = partial(FunctionType(own.__code__.replace(co_names=names), own.__globals__), layer)


def indexer_by_hand(layer):
    layer.indexer.forward = partial(layer.indexer.forward)


def put_back(layer):
    del layer.expand_kv


def with_an_indexer(layer):
    layer.indexer = torch.nn.Identity()


def mean_of_queries(layer):
    layer.indexer.wq_b.register_forward_hook(lambda part, args, out: out - out.mean(dim=1, keepdim=True))


HOOKED = "expected a Linear of a Parameter, without adapter, hook, bias or slices, for latents; or way=Ring"


def changed(name, before, after):
    each = every_model.small_model(name)
    layer = each.model.layers[1].self_attn
    before(layer)
    use_ring(each)  # takes each of them, and leaves it as it is
    use_ring(each, way=LatentRing)
    after(layer)
    each(**shard_batch(every_model.batch_of(each)))


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("llama", id, id, "LlamaForCausalLM has no layer with latents (expand_kv); expected way=Ring: keys and values"),
        ("llama", with_an_indexer, id, "LlamaAttention has a Identity, and passes no indices"),
        ("deepseek_v32", mean_of_queries, id, "DeepseekV32Indexer chooses other keys for some queries than for all"),
        ("hy_v4", id, id, "HYV4Attention has sinks, which the ring of latents does not know"),
        ("dots3_note_text", id, id, "Dots3NoteTextAttention has window, which"),
        ("deepseek_v3", other_values, id, "Other makes other keys and values from its latents than kv_b_proj"),
        ("deepseek_v3", id, biased, HOOKED),
        ("deepseek_v3", id, adapted, "kv_b_proj of DeepseekV3Attention is a Twice of a Parameter; expected a Linear"),
        ("deepseek_v3", partial(hooked, "forward"), id, HOOKED),
        *(
            ("deepseek_v3", id, partial(hooked, kind), HOOKED)
            for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
        ),
        ("deepseek_v3", own_expand, id, "DeepseekV3Attention has an expand_kv of its own; expected way=Ring"),
        ("deepseek_v3", id, own_expand, "DeepseekV3Attention passes no latents; expected way=Ring"),
        ("deepseek_v3", id, by_another_name, "DeepseekV3Attention passes no latents; expected way=Ring"),
        ("deepseek_v32", id, indexer_by_hand, "DeepseekV32Indexer has a forward that was set by hand"),
        ("deepseek_v3", id, put_back, "DeepseekV3Attention passes no latents; expected way=Ring"),
    ],
)
def test_what_the_ring_of_latents_would_leave_out_is_refused(processes, name, before, after, said):
    found = every_model.answer(processes.ring, 2, partial(changed, before=before, after=after), name)
    assert (found.kind, said in found.sentence) == ("refused", True), found


# Packed rows: windows, chunks, linear layers, indexers ---------------------------------------------------------------

KINDS = {  # of models, and what their config does not have by itself
    "mistral": {},
    "gpt2": {},
    "gemma2": {"attn_logit_softcapping": None},  # windows in some layers; sdpa knows no softcap
    "llama4_text": {"floor_scale": 3, "attn_scale": 1.0},  # chunks; queries grow with their place in a document
    "qwen3_5_text": {},
    "olmo_hybrid": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "kimi_linear": {},
    "bamba": {"time_step_limit": (0.1, 1.5)},
    "hy_v4": {"index_n_heads": 16},  # an index, sinks; few heads give scores of 0, and torch.topk any of them
}
IDS = torch.randint(every_model.FIRST, every_model.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
DOCUMENTS = [5, 1, 18]


def model(kind):
    with mock.patch.dict(every_model.VARIANTS, {kind: (kind, KINDS[kind])}):
        each = every_model.small_model(kind)
    for name, weight in each.named_parameters():
        if name.endswith("A_log"):
            weight.data.fill_(-3)  # states that are kept for many tokens: else nothing would cross a border
    return each


def results(each, loss):
    loss.backward()
    return loss.detach().clone(), every_model.gradient_of(each)


@cache
def alone(kind):
    """On one process, each document alone."""
    with every_model.Exactly():
        each = model(kind)
        parts = IDS.split(DOCUMENTS, dim=1)
        labels = [2 * (part.shape[1] - 1) for part in parts]
        losses = [each(input_ids=x, labels=x).loss * n for x, n in zip(parts, labels, strict=True) if n]
        return results(each, sum(losses) / sum(labels))


def in_ring(context, kind, layout):
    """A pass over other documents comes before the backward pass, which computes the layers again.

    Of 4 ranks each ring has two, which are not beside each other.
    """
    parts = [dist.new_group(part) for part in ([0, 2], [1, 3])] if context.world_size == 4 else [None]
    where = ContextParallel(parts[context.rank % len(parts)], layout)
    batch = {"input_ids": IDS, "labels": IDS}
    batch["position_ids"] = torch.cat([torch.arange(n) for n in DOCUMENTS]).expand(2, -1)
    others = {**batch, "position_ids": torch.cat([torch.arange(n) for n in DOCUMENTS[::-1]]).expand(2, -1)}
    with every_model.Exactly(), mock.patch("ringlab.hugging_face.indexers.QUERIES", 5):
        each = model(kind)
        use_ring(each, where)
        again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), every_model.Exactly())}
        each.gradient_checkpointing_enable(again)
        loss = each(**shard_batch(batch, where)).loss
        each(**shard_batch(others, where))
        found = results(each, loss)
    for x in found:
        dist.all_reduce(x, group=where.mesh_or_group)
    for error in (MemoryError, ValueError) if kind == "hy_v4" and parts[0] else ():  # in mid pass; then no group's
        with mock.patch("ringlab.hugging_face.indexers.positions", side_effect=MemoryError), pytest.raises(error):
            each(**shard_batch(batch, where))
    stop_ring(each)
    assert not any("forward" in vars(part) for part in each.modules())
    return found


@pytest.mark.parametrize(
    ("kind", "P", "layout"),
    [(k, 3, "striped" if k == "gpt2" else "zigzag") for k in KINDS]
    + [("mistral", 1, "zigzag"), *((k, 4, "contiguous") for k in ("qwen3_5_text", "hy_v4", "llama4_text"))],
)
def test_packed_documents_in_the_ring_are_each_document_on_one_process(ranks, kind, P, layout):
    for found in ranks(P, in_ring, kind, layout):
        assert max(errors(found, alone(kind))) <= every_model.TOLERANCE


# All of them ---------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_every_model():
    found = dict(every_model.sweep([*every_model.NAMES, *every_model.VARIANTS]))
    assert {name: each.kind for name, each in found.items()} == every_model.committed(), "stale: EVERY_MODEL.md"
    counts = Counter(found[name].kind for name in every_model.NAMES)
    assert counts["equal"] >= 110
    assert not {"wrong", "crashed", "unproven"} & {each.kind for each in found.values()}

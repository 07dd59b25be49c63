"""`model.generate` over a spread cache: tokens and logits of one process; what it sends; mistakes; and refusals."""

import gc
import weakref
from contextlib import nullcontext
from functools import lru_cache
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from ringlab.models.generate import SpreadCache
from ringlab.models.mesh import build_mesh
from tests.concepts import MISSING
from tests.mistakes import assert_refused

transformers = pytest.importorskip("transformers", reason=MISSING["transformers"])

from ringlab.hugging_face import generate as module  # noqa: E402
from ringlab.hugging_face.generate import spread_generation  # noqa: E402
from ringlab.hugging_face.use import stop_ring, use_ring  # noqa: E402
from tests.hugging_face.every_model import Exactly  # noqa: E402
from tests.hugging_face.hugging_face_models import EXPERTS, HEAD, NO_DROPOUT, SIZES, model_of, proved_sometimes  # noqa: E402
from tests.hugging_face.test_hugging_face_proof import LONGROPE  # noqa: E402

NEW = 9
NO_END = {"eos_token_id": None}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1}
MODELS = {
    "Llama": {},
    "Qwen3": HEAD,  # its heads are normed
    "Mistral": {"sliding_window": 5},
    "Granite": {"attention_multiplier": 0.6},  # its own scale
    "GPT2": NO_DROPOUT,  # learned positions
    "DeepseekV3": LATENT,  # v with a head dimension of its own
    "GptOss": {**HEAD, **EXPERTS, "sliding_window": 5},  # sinks, and layers with and without a window
    "Gemma2": {**HEAD, "attn_logit_softcapping": 2.0, "sliding_window": 5},
}
EAGER = ("GptOss", "Gemma2")  # sdpa knows neither sinks nor softcap
LENGTHS = (13, 6, 1)  # no multiple of 2P for any P > 1; the last one is shorter than any P > 1


def prompts_of(lengths=LENGTHS, width=None):
    """Prompts with padding on the left, up to `width` columns; without padding there is no mask."""
    width = width or max(lengths)
    tokens = torch.randint(1, SIZES["vocab_size"], (len(lengths), width), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": tokens * mask} | ({} if mask.all() else {"attention_mask": mask})


def generated(model, seed, prompts, **asked):
    """The tokens (B, S + new), and the logits of each new one (B, new, vocab)."""
    torch.manual_seed(seed)
    asked = {"max_new_tokens": NEW, "do_sample": False, **asked}
    eager = model.config._attn_implementation == "eager"  # its softmax in float32 gives NaN for padding in float64
    with Exactly() if eager else nullcontext():
        out = model.generate(**prompts, **asked, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits, dim=1)


def evaluated(name, options=None):
    """With larger weights, so that tokens depend on the whole text."""
    model = model_of(name, {**NO_END, **(MODELS[name] if options is None else options)}).eval()
    for part, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.mul_(2)
        elif "bias" in part:
            weight.data.sub_(1.0)
    if name in EAGER:
        model.set_attn_implementation("eager")
    return model


@lru_cache
def one_process(name, lengths=LENGTHS, width=None, end=None, **asked):
    return generated(evaluated(name, {**MODELS[name], "eos_token_id": end}), 0, prompts_of(lengths, width), **asked)


@proved_sometimes()
def on_ranks(context, name, prompts, asked, layout="zigzag", options=None):
    """The same, on every rank with another seed."""
    model = evaluated(name, options)
    with spread_generation(model, layout=layout):
        return generated(model, context.rank, prompts, **asked)


def check(results, right):
    """All tokens are equal. The logits are float32, so each may round to the number beside the right one."""
    for tokens, logits in results:
        assert torch.equal(tokens, right[0])
        assert (logits - right[1]).norm() <= torch.finfo(torch.float32).eps * right[1].norm()


CASES = [(3, name, "zigzag") for name in ("Mistral", "GPT2", "DeepseekV3", "GptOss", "Gemma2")]
CASES += [(4, "Granite", "striped"), (2, "Qwen3", "contiguous")]


@pytest.mark.parametrize(("world_size", "name", "layout"), CASES)
def test_a_batch_with_padding_on_the_left_gets_the_tokens_of_one_process(ranks, world_size, name, layout):
    right = one_process(name)
    assert len(set(right[0][:, -NEW:].flatten().tolist())) >= 5  # the tokens vary
    check(ranks(world_size, on_ranks, name, prompts_of(), {}, layout), right)


def test_equal_short_and_far_padded_prompts(ranks):
    for lengths, width in (((12, 12), None), ((1,), None), ((3, 2), 17)):  # 4 ranks read 16, 8 and 8 tokens
        prompts = prompts_of(lengths, width)
        check(ranks(4, on_ranks, "Qwen3", prompts, {}), one_process("Qwen3", lengths, width))


def test_padding_needs_no_positions_of_its_own(ranks):
    """18 tokens are padded to 24 on 4 ranks; the model has 18 positions."""
    options, prompts, asked = {**NO_DROPOUT, "max_position_embeddings": 18}, prompts_of((18,)), {"max_new_tokens": 1}
    right = generated(evaluated("GPT2", options), 0, prompts, **asked)
    check(ranks(4, on_ranks, "GPT2", prompts, asked, "zigzag", options), right)
    words = ["a prompt has 19 tokens", "expected 18 at most"]
    assert_refused(ranks, 4, words, on_ranks, "GPT2", prompts_of((19, 3)), asked, "zigzag", options)


SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 1.5, "top_p": 0.9}


@pytest.mark.parametrize("asked", [{**SAMPLED, "num_return_sequences": 2}, {"repetition_penalty": 1.7}])
def test_rank_0_samples_for_all(ranks, asked):
    right = one_process("Granite", **asked)
    assert not torch.equal(right[0][:, -NEW:], one_process("Granite")[0][: len(right[0]), -NEW:])
    check(ranks(3, on_ranks, "Granite", prompts_of(), asked), right)


def test_texts_that_end_early_are_padded(ranks):
    end = int(one_process("Llama")[0][1, 13 + 2])  # the third new token of the second prompt
    right = one_process("Llama", end=end)
    assert (right[0][1, 13 + 3 :] == 0).all()
    options = {**MODELS["Llama"], "eos_token_id": end}
    check(ranks(3, on_ranks, "Llama", prompts_of(), {}, "zigzag", options), right)


# Ranks that are not alike --------------------------------------------------------------------------------------------


def with_clocks(context):
    """Rank 0's time is up after its third token; the others' time never is."""
    model, ended = evaluated("Llama"), transformers.MaxTimeCriteria.__call__

    def late(criteria, input_ids, scores, **options):
        done = ended(criteria, input_ids, scores, **options)
        return done | (context.rank == 0 and input_ids.shape[1] == 13 + 3)

    with mock.patch.object(transformers.MaxTimeCriteria, "__call__", late), spread_generation(model):
        return generated(model, 0, prompts_of(), max_time=3600.0)


def test_rank_0_says_when_it_ends(ranks):
    tokens, logits = one_process("Llama")
    check(ranks(3, with_clocks), (tokens[:, : 13 + 3], logits[:, :3]))


def streamed(context, on_all):
    model = evaluated("Llama")
    told = mock.Mock() if on_all or context.rank == 0 else None
    with spread_generation(model):
        model.generate(**prompts_of((7,)), max_new_tokens=NEW, do_sample=False, streamer=told)
    return told and [call.args[0].flatten().tolist() for call in told.put.call_args_list]


def test_rank_0_may_stream(ranks):
    right = one_process("Llama", (7,))[0][0].tolist()
    assert ranks(3, streamed, False) == [[right[:7], *([token] for token in right[7:])], None, None]
    assert_refused(ranks, 3, ["rank 1: a streamer was given", "expected one on rank 0 only"], streamed, True)


def in_two_rings(context):
    """A mesh of 2 x 2 ranks: each ring has a prompt of its own, all ranks a slice of the weights."""
    mesh, line = build_mesh(2, 2, "cpu")
    ring, model = mesh.get_coordinate()[0], evaluated("Mistral")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=line)
    streamer = mock.Mock() if mesh["cp"].get_local_rank() == 0 else None
    with spread_generation(model, mesh["cp"]):
        return ring, *generated(model, 0, prompts_of(((11,), (8,))[ring]), streamer=streamer)


def test_each_ring_of_a_mesh_writes_its_own_and_weights_may_be_fully_sharded(ranks):
    for ring, *result in ranks(4, in_two_rings):
        check([result], one_process("Mistral", ((11,), (8,))[ring]))


# In other precisions --------------------------------------------------------------------------------------------


def in_precision(context, kind, spread):
    """The tokens, and the logits of the first new ones."""
    model = evaluated("Qwen3").to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"),
        spread_generation(model) if spread else nullcontext(),
    ):
        tokens, logits = generated(model, 0, prompts_of())
    return tokens, logits[:, 0]


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_in_other_precisions_the_error_is_that_of_one_process(ranks, kind):
    exact = one_process("Qwen3")[1][:, 0]
    _, own = in_precision(None, kind, spread=False)
    results = ranks(3, in_precision, kind, True)
    assert len({tuple(tokens.flatten().tolist()) for tokens, _ in results}) == 1
    assert max((logits - exact).norm() for _, logits in results) <= 2 * (own - exact).norm()


# Before and after ----------------------------------------------------------------------------------------------------


def left_as_it_was(context):
    """Also where it was left by an error."""
    model = evaluated("Llama")
    before, caches, rooms = model(**prompts_of()).logits, [], []

    def fails(input_ids, scores):
        with pytest.raises(ValueError, match="called with another cache"):
            model(input_ids)
        raise KeyboardInterrupt

    def begin(cache, at, room, own=SpreadCache.begin):
        rooms.append(room)
        own(cache, at, room)

    with pytest.raises(KeyboardInterrupt), spread_generation(model):
        generated(model, 0, prompts_of(), logits_processor=[fails])
    assert "generate" not in vars(model)
    skips = mock.patch.object(model.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, 0))
    with spread_generation(model), skips, pytest.raises(ValueError, match="2 layers called the spread cache 1 time"):
        generated(model, 0, prompts_of())

    def noted(*args, **options):
        cache = SpreadCache(*args, **options)
        caches.append(weakref.ref(cache))
        return cache

    with spread_generation(model):
        assert torch.equal(before, model(**prompts_of()).logits)
        with mock.patch.object(module, "SpreadCache", noted), mock.patch.object(SpreadCache, "begin", begin):
            generated(model, 0, prompts_of())
        gc.collect()
        assert rooms == [0, 4], "of 8 tokens that are stored, each of two ranks has 4"
        assert [cache() for cache in caches] == [None], "K and V stay in memory after generate"
        again = generated(model, 0, prompts_of())
        with pytest.raises(ValueError, match="generates by another function"), spread_generation(model):
            pass
    assert torch.equal(before, model(**prompts_of()).logits)
    assert (type(model), model.config._attn_implementation) == (transformers.LlamaForCausalLM, "sdpa")
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    use_ring(model)
    with pytest.raises(ValueError, match=r"is in a ring, .* stop_ring\(model\) first"), spread_generation(model):
        pass
    stop_ring(model)
    check([generated(model, 0, prompts_of())], again)
    return again


def test_the_model_is_left_as_it_was(ranks):
    check(ranks(2, left_as_it_was), one_process("Llama"))


# Refusals ------------------------------------------------------------------------------------------------------------


def called(context, change, name="Llama", options=None):
    """Call generate with its arguments changed by a function of the model, the arguments and the rank."""
    model = evaluated(name, options)
    asked = {**prompts_of(), "max_new_tokens": 2, "do_sample": False}
    asked = change(model, asked, context.rank) or asked
    ran = mock.patch.object(module, "SpreadCache", side_effect=AssertionError("it ran"))
    with spread_generation(model, layout=asked.pop("layout", "zigzag")), ran:
        model.generate(**asked)


def asks(**more):
    return lambda model, asked, rank: {**asked, **more}


def on_rank_1(**more):
    return lambda model, asked, rank: {**asked, **more} if rank == 1 else asked


def masked(row, column):
    def change(model, asked, rank):
        asked["attention_mask"][row, column] = 0

    return change


def other_weights(model, asked, rank):
    if rank == 2:
        model.lm_head.weight.data[3, 3] *= 1 + 1e-15


def with_embeddings(model, asked, rank):
    embedded = model.get_input_embeddings()(asked.pop("input_ids"))
    return {**asked, "inputs_embeds": embedded}


def with_token(token):
    def change(model, asked, rank):
        asked["input_ids"][0, 0] = token

    return change


GAP = ["padding at its end or between tokens", "expected padding on the left only"]
REFUSED = [
    (asks(num_beams=2), ["generate was asked for beam_search", "expected greedy search or sampling"]),
    (asks(cache_implementation="static"), ["cache_implementation is static", "expected None"]),
    (asks(use_cache=False), ["use_cache is False", "the only cache here"]),
    (asks(custom_generate="someone/something"), ["custom_generate is someone/something", "expected None"]),
    (asks(guidance_scale=1.5), ["guidance_scale is 1.5", "a second cache"]),
    (asks(output_attentions=True, return_dict_in_generate=True), ["generate got output_attentions", "expected none"]),
    (asks(output_hidden_states=True, return_dict_in_generate=True), ["generate got output_hidden_states", "none"]),
    (asks(prefill_chunk_size=4), ["generate got prefill_chunk_size", "expected none"]),
    (with_embeddings, ["generate got inputs_embeds", "expected none"]),
    (asks(past_key_values=transformers.DynamicCache()), ["past_key_values were given", "expected none"]),
    (lambda model, asked, rank: model.train() and None, ["in training mode", "expected model.eval()"]),
    (lambda model, asked, rank: {**asked, "attention_mask": asked["attention_mask"].flip(1)}, GAP),
    (masked(0, 5), GAP),
    (masked(2, slice(None)), GAP),
    *((with_token(x), ["input_ids are (3, 13)", "expected tokens in each row, from 0 to 60"]) for x in (-1, 61)),
    (asks(position_ids=torch.arange(1, 14).expand(3, 13)), ["position_ids were given", "expected none, or 0, 1, 2"]),
    (other_weights, ["the ranks disagree about weights"]),
    (on_rank_1(max_new_tokens=3), ["the ranks disagree about arguments"]),
    (on_rank_1(layout="striped"), ["the ranks disagree about layout"]),
    (on_rank_1(**{name: x.flip(0) for name, x in prompts_of().items()}), ["the ranks disagree about prompts"]),
    (on_rank_1(**prompts_of((13, 5, 1))), ["the ranks disagree about prompts"]),
    (on_rank_1(max_new_tokens=-1), ["rank 1: "]),
    (on_rank_1(input_ids=[[1]]), ["rank 1: generate raises"]),
]


def refused(context, i):
    with mock.patch.object(module, "prove"):  # the model is right
        called(context, REFUSED[i][0])


def test_what_cannot_be_done_is_refused_on_every_rank_before_the_model_runs(ranks):
    for i, (_, words) in enumerate(REFUSED):
        assert_refused(ranks, 3, words, refused, i)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
LLAMA_4 = {**HEAD, **EXPERTS, "intermediate_size_mlp": 40, "num_experts_per_tok": 1, "attention_chunk_size": 8}
CHUNKS = {**LLAMA_4, "attn_temperature_tuning": False, "layer_types": ["chunked_attention", "full_attention"]}


UNSERVED = [
    ("Mamba", {}, ["MambaForCausalLM keeps a state over tokens"]),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, ["Lfm2ForCausalLM has linear layers"]),
    ("Llama", {"rope_parameters": DYNAMIC}, ["chooses its frequencies by the longest position"]),
    ("Llama", {"rope_parameters": LONGROPE}, ["chooses its frequencies by the longest position"]),
    ("Llama4Text", LLAMA_4, ["has a temperature by position", "causal attention and windows"]),
    ("Llama4Text", CHUNKS, ["has ChunkedAttention(size=8)", "causal attention and windows"]),
    ("Llama", {"is_causal": False}, ["has BothWays()", "causal attention and windows"]),
]


def entered(context, name, options):
    with spread_generation(model_of(name, options)):
        pass


def test_a_model_that_a_spread_cache_cannot_serve_is_refused(ranks):
    for name, options, words in UNSERVED:
        assert_refused(ranks, 2, words, entered, name, options)

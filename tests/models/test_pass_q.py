"""Attention over a spread cache, whether Q or K and V travel: exact; what it sends; what it refuses; and mistakes."""

from dataclasses import dataclass, field, replace
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringlab.models import generate
from ringlab.models import pass_q as module
from ringlab.models.generate import EMPTY, alone, seeded
from ringlab.models.pass_q import GrowingCache, agree_on_places, cached_attention, reply
from ringlab.models.transformer import Transformer
from ringlab.ring.masks import Mask
from ringlab.support.expect import attempt
from ringlab.support.rounding import exact_attention
from tests.attention import SEED, assert_right, dense, random_qkv
from tests.every_way import assert_programs, few_or_many
from tests.mistakes import assert_refused
from tests.models.test_generate import CONFIG, windowed

KEYS, NEW = (9, 0, 13, 1, 6), (2, 3, 0, 1, 0)  # on ranks 0, 1, ...


@dataclass(frozen=True)
class Case:
    """How many keys and new tokens each rank has of a text. Where they stand is random; the last tokens are new."""

    keys: tuple
    new: tuple
    heads: tuple = (4, 2)
    dims: tuple = (4, 4)  # D, and that of v
    mask: dict = field(default_factory=lambda: {"causal": True})
    options: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    shorter: int | None = None  # a second text has so many new tokens less; there its places are padding
    anywhere: bool = False  # the new tokens are not the last ones

    def deal(self):
        """For each text, for each rank: the positions of its new tokens and of its keys, EMPTY for padding."""
        generator, texts = torch.Generator().manual_seed(SEED), []
        for less in (0,) if self.shorter is None else (0, self.shorter):
            n, T = sum(self.keys) - less, sum(self.new) - less
            order = torch.randperm(n, generator=generator)
            new = torch.randperm(n, generator=generator)[:T] if self.anywhere else torch.arange(n - T, n)
            padding = torch.full((less,), EMPTY)
            new, keys = (torch.cat([x, padding]).split(counts) for x, counts in ((new, self.new), (order, self.keys)))
            texts.append([(a.sort().values, b.sort().values) for a, b in zip(new, keys, strict=True)])
        return texts

    def inputs(self):
        """q (B, H, S, D), k (B, G, S, D), v (B, G, S, Dv) of whole texts, and the sinks (H,)."""
        (H, G), (D, D_v), S, B = self.heads, self.dims, sum(self.keys), len(self.deal())
        (q, _, _), (_, k, _) = random_qkv((B, H, S, D), self.dtype), random_qkv((B, G, S, D), self.dtype, seed=1)
        return q, k, random_qkv((B, G, S, D_v), self.dtype, seed=2)[2], torch.linspace(-1, 2, H, dtype=torch.float64)

    def of_rank(self, rank):
        """q, k, v, and the positions of the new tokens and of the keys of a rank."""
        at, keys_at = (torch.stack([text[rank][kind] for text in self.deal()]) for kind in (0, 1))
        mine = []
        for x, places in zip(self.inputs()[:3], (at, keys_at, keys_at), strict=True):
            index = places.where(places < EMPTY, 0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
            mine.append(x.gather(2, index))
        return *mine, at, keys_at

    def right(self):
        """For each text, what out must be for its new tokens in order of rank."""
        q, k, v, sinks = self.inputs()
        for text, of_ranks in enumerate(self.deal()):
            at, keys_at = (torch.cat(x) for x in zip(*of_ranks, strict=True))
            at, n = at[at < EMPTY], int((keys_at < EMPTY).sum())
            options = {name: x for name, x in self.options.items() if name != "sinks"}
            one = q[text : text + 1, :, at], k[text : text + 1, :, :n], v[text : text + 1, :, :n]
            right = exact_attention(
                *one, visible=dense(Mask(**self.mask), at, torch.arange(n)), fused_blocks=24, **options
            )
            of_keys = torch.sigmoid(right["lse"].exact - sinks[:, None]) if "sinks" in self.options else torch.ones(1)
            yield replace(right["out"], exact=right["out"].exact * of_keys[..., None])  # a sink's value is 0


def cases(P):
    keys, new = KEYS[:P], NEW[:P]
    S, third = sum(keys), sum(keys) // 3
    documents = [third, S - third]
    several = {"causal": True, "documents": documents, "window": third, "global_tokens": 2}
    return {
        "causal": Case(keys, new),
        "window, documents, global tokens": Case(keys, new, mask=several, anywhere=True),
        "a head of K and V, another D of V, a scale": Case(keys, new, (3, 1), (8, 4), options={"scale": 0.3}),
        "as many heads, softcap": Case(keys, new, (2, 2), options={"softcap": 0.7}),
        "sinks": Case(keys, new, options={"sinks": True}),
        "one new token": Case(keys, (*[0] * (P - 1), 1)),
        "all are new": Case(keys, keys),
        "equal chunks": Case((6,) * P, (3,) * P),
        "two texts, one shorter": Case(keys, new, shorter=1),
        "float32": Case((40,) * P, new, (8, 2), (16, 16), dtype=torch.float32),
        "bfloat16": Case((40,) * P, new, (8, 2), (16, 16), dtype=torch.bfloat16),
    }


def attention(context, problems, passing="auto", group=None):
    """This rank's out of each problem, what travelled, and the bytes that this rank sent to others."""
    results, sent = [], []

    def hop(operations):
        sent.extend(it.tensor.nbytes for it in operations if it.op is dist.isend)
        return right_hop(operations)

    def exchange(received, given, sizes=None, given_sizes=None, **options):
        if given.dtype != torch.uint8:  # else the ranks agree
            others = sum(given_sizes) - given_sizes[context.rank]
            sent.append(others * given.element_size())
        return right_exchange(received, given, sizes, given_sizes, **options)

    right_hop, right_exchange = dist.batch_isend_irecv, dist.all_to_all_single
    with mock.patch.multiple(dist, batch_isend_irecv=hop, all_to_all_single=exchange):
        for case in problems:
            q, k, v, at, keys_at = case.of_rank(context.rank)
            options = {**case.options, **({"sinks": case.inputs()[3]} if "sinks" in case.options else {})}
            before, sent[:] = [x.clone() for x in (q, k, v)], []
            places = agree_on_places(at, keys_at, group, **case.mask)
            out, passed = cached_attention(q, k, v, places, passing=passing, **options)
            assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)), "the input changed"
            results.append((out, passed, sum(sent)))
    return results


def assert_exact(case, of_ranks):
    """The outs of the ranks are as near to float64 as rounding allows; what padding gets is not NaN."""
    for text, (places, right) in enumerate(zip(case.deal(), case.right(), strict=True)):
        outs = [
            out[text : text + 1, :, : (at < EMPTY).sum()] for (at, _), (out, _, _) in zip(places, of_ranks, strict=True)
        ]
        assert_right(torch.cat(outs, dim=2), right)
    assert all(out.isfinite().all() for out, _, _ in of_ranks)


@pytest.mark.parametrize(("size", "passing"), [(size, passing) for size in (1, 3, 5) for passing in ("Q", "KV")])
def test_whatever_travels_the_result_is_full_attention(ranks, size, passing):
    problems = cases(size)
    of_ranks = ranks(size, attention, list(problems.values()), passing)
    for name, case, results in zip(problems, problems.values(), zip(*of_ranks, strict=True), strict=True):
        try:
            assert_exact(case, results)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
        assert {passed for _, passed, _ in results} == {passing}


def test_the_bytes_on_the_wire_are_those_of_the_formulas_and_auto_sends_fewer(ranks):
    size = 4
    problems = [case for case in cases(size).values() if case.dims[0] == case.dims[1] and case.shorter is None]
    found = {passing: ranks(size, attention, problems, passing) for passing in ("Q", "KV", "auto")}
    taken = set()
    for i, case in enumerate(problems):
        (H, G), (D, _), w = case.heads, case.dims, case.dtype.itemsize
        keys, queries = (size - 1) * sum(case.keys) * 2 * G * D * w, (size - 1) * sum(case.new) * H * D * w
        home = (size - 1) * sum(case.new) * H * (D + 1) * max(w, 4)
        sums = {passing: sum(results[i][2] for results in of_ranks) for passing, of_ranks in found.items()}
        assert sums["KV"] == keys
        assert sums["Q"] == queries + home
        passed = {results[i][1] for results in found["auto"]}
        assert sums["auto"] == min(sums["Q"], sums["KV"])
        assert passed == ({"KV"} if sums["KV"] <= sums["Q"] else {"Q"})
        taken |= passed
    assert taken == {"Q", "KV"}


def taken(context, dtype, keys, new):
    """What travels of 4 heads on 1 of 4 numbers, with so many keys and new tokens on each of 2 ranks."""
    at = torch.arange(keys).view(1, -1) + context.rank * keys
    places = module.agree_on_places(at[:, -new:], at, causal=True)
    q, k, v = (torch.zeros(1, heads, n, 4, dtype=dtype) for heads, n in ((4, new), (1, keys), (1, keys)))
    return module.cached_attention(q, k, v, places)[1]


@pytest.mark.parametrize(
    ("dtype", "keys", "passing"),
    [(torch.bfloat16, 7, "KV"), (torch.bfloat16, 8, "Q"), (torch.float32, 4, "KV"), (torch.float32, 5, "Q")],
)
def test_fewer_bytes_travel_also_where_results_are_wider(ranks, dtype, keys, passing):
    """A new token: 16 numbers of q, and 20 in float32. A key: 8 numbers. In 16 bits 112 bytes and 16; else 144 and 32.

    So 7 keys a new token are as many bytes as Q in 16 bits, and 4.5 in float32.
    """
    assert ranks(2, taken, dtype, keys, 1) == [passing] * 2


def one_after_the_other(context, problems):
    """Two calls of other lengths in a part of the job, ranks 0, 2 and 4, beside the other part, ranks 1, 3 and 5."""
    groups, (place, part) = [dist.new_group(ranks) for ranks in ([0, 2, 4], [1, 3, 5])], divmod(context.rank, 2)
    alone = partial(attention, replace(context, rank=place), group=groups[part])
    return [alone([case], passing)[0] for case in problems[part] for passing in ("Q", "KV")]


def test_pieces_of_one_call_are_not_those_of_the_next_nor_of_another_part_of_the_job(ranks):
    first, second = Case((6, 6, 6), (3, 3, 3)), Case((9, 2, 4), (1, 2, 4))
    of_ranks = ranks(6, one_after_the_other, [[first, second], [second, first]])
    for part, (one, other) in enumerate([(first, second), (second, first)]):
        for case, results in zip((one, one, other, other), zip(*of_ranks[part::2], strict=True), strict=True):
            assert_exact(case, results)


def places_refused(context, of_ranks, masks):
    texts = (x if x and isinstance(x[0], list) else [x] for x in of_ranks[context.rank])
    at, keys_at = (torch.tensor(x) if x == [[0.5]] else torch.tensor(x).long() for x in texts)
    return agree_on_places(at, keys_at, **masks[context.rank])


GOOD = [([4], [0, 4]), ([], [1]), ([5], [2, 3, 5])]
ALIKE = [{"causal": True}] * 3


def with_rank_1(at, keys_at):
    return [GOOD[0], (at, keys_at), GOOD[2]]


PLACES = [
    (with_rank_1([], [0.5]), ALIKE, ["rank 1: keys_at is torch.float32", "expected int64"]),
    (with_rank_1([[], []], [1]), ALIKE, ["rank 1: keys_at is torch.int64 of shape (1, 1), at (2, 0)", "(B, tokens)"]),
    (with_rank_1([-1, *range(7)], [1]), ALIKE, ["rank 1: at is -1, 0, 1, 2, 3, 4, 5, 6; expected positions from 0 on"]),
    (with_rank_1([1, 1], [1]), ALIKE, ["rank 1: at is 1, 1;", "rising"]),
    (with_rank_1([], [1, EMPTY, 6]), ALIKE, ["rank 1: keys_at", "EMPTY at the end"]),
    (with_rank_1([], [6]), ALIKE, ["text 0 has a key at position 2 where 1 should follow", "each on one rank"]),
    (with_rank_1([6], [1]), ALIKE, ["a new token at position 6 and 6 keys", "a key for each new token"]),
    ([GOOD[0], ([[], []], [[1], [1]]), GOOD[2]], ALIKE, ["disagree about number of texts", "rank 1: number"]),
    (GOOD, [{"causal": True}, {"causal": False}, {"causal": True}], ["disagree about mask", "rank 1: mask=Mask(causa"]),
    (GOOD, [{"causal": True, "documents": [5]}] * 3, ["documents of 5 tokens", "for a sequence of 6"]),
    ([([], [0]), ([], [1]), ([], [2])], ALIKE, ["no new token", "expected 1 or more"]),
]


def test_places_that_make_no_sense_are_refused_on_every_rank(ranks):
    for of_ranks, masks, words in PLACES:
        assert_refused(ranks, 3, words, places_refused, of_ranks, masks)


def call_refused(context, change):
    case = cases(3)["equal chunks"]
    q, k, v, at, keys_at = case.of_rank(context.rank)
    given = {"q": q, "k": k, "v": v, "places": agree_on_places(at, keys_at, causal=True), "passing": "Q"}
    if context.rank == 1:
        given |= CHANGES[change][0](given)
    with mock.patch.object(module, "arriving_blocks", side_effect=AssertionError("sent before all ranks agreed")):
        return cached_attention(**given)


CHANGES = {  # what rank 1 gives, and what every rank says
    "tokens of q": (lambda it: {"q": it["q"][:, :, 1:]}, ["rank 1: q, k and v are", "expected what the places say"]),
    "tokens of v": (lambda it: {name: it[name][:, :, 1:] for name in "kv"}, ["rank 1: q, k and v are", "k and v of 6"]),
    "passing of a rank": (lambda it: {"passing": "KV"}, ["rank 0: passing=Q", "rank 1: passing=KV"]),
    "passing": (lambda it: {"passing": "V"}, ["rank 1: passing is 'V'", "expected 'Q', 'KV' or 'auto'"]),
    "gradients": (lambda it: {"q": it["q"].requires_grad_()}, ["rank 1: the input requires gradients"]),
    "sinks": (lambda it: {"sinks": torch.zeros(3)}, ["rank 1: sinks is"]),
    "sinks of a rank": (lambda it: {"sinks": torch.zeros(4)}, ["rank 0: sinks=None", "rank 1: sinks=torch.float32"]),
    "softcap": (lambda it: {"softcap": 0.0}, ["rank 1: softcap is 0"]),
    "softcap of a rank": (lambda it: {"softcap": 0.5}, ["rank 0: softcap=None", "rank 1: softcap=0.5"]),
    "texts": (
        lambda it: {"places": replace(it["places"], queries=tuple(x.repeat(2, 1) for x in it["places"].queries))},
        ["rank 1: q, k and v are", "2 text(s)"],
    ),
}


def test_a_call_that_does_not_fit_is_refused_on_every_rank_before_anything_travels(ranks):
    for change, (_, words) in CHANGES.items():
        assert_refused(ranks, 3, words, call_refused, change)


ANSWER = 3


def model_of(attention):
    with mock.patch.object(generate, "CONFIG", CONFIG):
        return seeded(attention).double()


# Sequences of conversations -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What is done with a cache: it begins anew, generates after prompts, or replies to texts of these lengths."""

    what: str
    lengths: tuple
    part: int = 99

    def texts(self):
        generator = torch.Generator().manual_seed(sum(self.lengths))
        return [torch.randint(CONFIG.vocab, (length,), generator=generator).tolist() for length in self.lengths]


def any_turn(program, random):
    """Add a turn to a program, mostly a reply to as many texts as before."""
    if program.last is None or random.random() < 0.2:
        program.last = random.randint(1, 2)
    lengths = tuple(random.randint(1, 9) for _ in range(program.last))
    program.add(Turn(random.choice(["reply", "reply", "reply", "begin", "generate"]), lengths, random.choice([99, 4])))


def conversations_on_rank(context, passing, turns, settings):
    """What each turn answers, or refuses."""
    cache, said = GrowingCache(**settings), []
    cache.passing = passing
    model = model_of(cache)
    for turn in turns:
        if turn.what == "begin":
            said.append(cache.begin(torch.empty(len(turn.lengths), 0, dtype=torch.int64), room=0))
        elif turn.what == "generate":
            said.append(generate.generate(model, cache, turn.texts(), ANSWER).tolist())
        else:
            answers = attempt(reply, model, cache, turn.texts(), ANSWER, turn.part)
            said.append(answers if isinstance(answers, str) else answers.tolist())
    return said


def stored_in_short_turns(context):
    cache = GrowingCache()
    model = model_of(cache)
    for _ in range(4):
        reply(model, cache, [[1, 2]], 1, part=1)
    return int((cache.at < EMPTY).sum())


def test_short_parts_and_turns_fill_all_caches_alike(ranks):
    """Four texts of two tokens, and three answers of one, which the next turn reads."""
    assert sorted(ranks(3, stored_in_short_turns)) == [3, 4, 4]


@cache
def alone_after(text, window=None):
    """The answer of one process, which reads everything that was said before at once."""
    attention = partial(windowed, window=window) if window else F.scaled_dot_product_attention
    return alone(model_of(attention), text, ANSWER)


def run_conversations(ranks, P, passing, turns, **settings):
    so_far = []  # of the conversation in hand, what was said in each text
    for turn, answers in zip(turns, ranks(P, conversations_on_rank, passing, turns, settings)[P - 1], strict=True):
        if turn.what != "reply":
            so_far = []
        if turn.what == "begin":
            continue
        if so_far and len(so_far) != len(turn.lengths):
            assert f"for {len(so_far)} conversations" in answers
            continue
        so_far = [
            [*before, *text] for before, text in zip(so_far or [[]] * len(turn.lengths), turn.texts(), strict=True)
        ]
        right = [alone_after(tuple(text), settings.get("window")) for text in so_far]
        assert answers == right, turn
        so_far = [text + answer for text, answer in zip(so_far, right, strict=True)] if turn.what == "reply" else []


SETTINGS = [(2, "auto", {"layout": "contiguous"}), (3, "Q", {"window": 4})]
SETTINGS += [
    pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((1, "auto", {}), (4, "KV", {"layout": "striped"}))
]


@pytest.mark.parametrize(("P", "passing", "settings"), SETTINGS)
@few_or_many(10, 110)
def test_no_conversation_remembers_another(ranks, P, passing, settings, programs):
    assert_programs(any_turn, programs, partial(run_conversations, ranks, P, passing, **settings), steps=5)


def turn_refused(context, parts):
    cache = GrowingCache()
    model, texts = model_of(cache), [[1, 2, 3]]
    with mock.patch.object(Transformer, "forward", side_effect=AssertionError("computed before all ranks agreed")):
        return reply(model, cache, texts, ANSWER, parts[context.rank])


def test_a_turn_that_makes_no_sense_is_refused_on_every_rank_before_the_model_runs(ranks):
    assert_refused(ranks, 3, ["part is 0", "expected 1 token or more"], turn_refused, (0, 0, 0))
    assert_refused(ranks, 3, ["disagree about part"], turn_refused, (5, 6, 5))


def test_a_layer_with_another_window_than_the_cache_is_refused():
    q = torch.zeros(1, 1, 1, 2)
    with pytest.raises(ValueError, match=r"window 3; expected that of the cache, None"):
        GrowingCache().attend(q, q, q, window=3)

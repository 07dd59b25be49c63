"""All-to-all and hybrids with one mistake each. The check that the right ones pass must reject every one of them.

On each rank: with WRONG["the layout is not undone"](): ...
"""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

from ringlab.training import all_to_all, hybrid
from ringlab.training.all_to_all import Exchange
from ringlab.training.masks import Mask
from ringlab.training.split_heads import heads_of_ranks

right_to_heads, right_to_tokens, right_places = Exchange.to_heads, Exchange.to_tokens, all_to_all.places


@contextlib.contextmanager
def in_both(name, mistake):
    """Replace a function that both modules use."""
    with mock.patch.object(all_to_all, name, mistake), mock.patch.object(hybrid, name, mistake):
        yield


def exchanges(name, mistake):
    return lambda: mock.patch.object(Exchange, name, mistake)


def heads_transposed(exchange, wholes):
    """The heads of out in the order (number on its rank, rank), where (rank, number) is right."""
    results, ranks = right_to_tokens(exchange, wholes), len(exchange.places)
    if len(wholes) == 1:  # out; three are gradients
        results = [x.unflatten(1, (ranks, -1)).transpose(1, 2).flatten(1, 2) for x in results]
    return results


def kv_head_modulo(heads, kv_heads, world_size):
    """K/V head r mod G on rank r."""
    queries, _ = heads_of_ranks(heads, kv_heads, world_size)
    return queries, [slice(r % kv_heads, r % kv_heads + 1) for r in range(world_size)]


def own_copy_twice(exchange, wholes):
    """What a rank computes for its copy of a K/V head is added twice to the gradient of its own tokens."""
    results, rank = right_to_tokens(exchange, wholes), dist.get_rank(exchange.group)
    if len(wholes) == 3:
        for x, whole in zip(results[1:], wholes[1:], strict=True):
            x[:, exchange.keys[rank]] += whole[:, :, exchange.places[rank]]
    return results


def last_copy_only(exchange, wholes):
    """The gradients of the copies of a K/V head are not added: that of the last rank stays."""
    rank, keys = dist.get_rank(exchange.group), exchange.keys
    if len(wholes) == 3 and keys[rank] in keys[rank + 1 :]:
        wholes = [wholes[0], 0 * wholes[1], 0 * wholes[2]]
    return right_to_tokens(exchange, wholes)


def order_of_rank(mask, ranks, device):
    """The tokens stay as they come: those of the first rank, those of the second, ..."""
    lengths = [mask.lengths[rank] for rank in ranks]
    return torch.arange(sum(lengths)).split(lengths)


def back_to_other_ranks(exchange, wholes):
    """Each rank gets the tokens of the next one."""
    places = [*exchange.places[1:], exchange.places[0]]
    return right_to_tokens(Exchange(exchange.queries, exchange.keys, tuple(places), exchange.group), wholes)


def back_as_they_came(exchange, wholes):
    """Out goes back as if its tokens were in order of rank."""
    if len(wholes) == 3:
        return right_to_tokens(exchange, wholes)
    places = torch.arange(sum(map(len, exchange.places))).split([len(at) for at in exchange.places])
    return right_to_tokens(Exchange(exchange.queries, exchange.keys, places, exchange.group), wholes)


def of_other_heads(exchange, tensors):
    """The gradient of out is exchanged with its heads shifted by one."""
    return right_to_heads(exchange, [x.roll(1, dims=1) for x in tensors] if len(tensors) == 1 else tensors)


def rows_as_ranks(mask, rows):
    """The mask of the same layout, as if the rows were the ranks of a flat ring."""
    lengths = tuple(sum(some) for some in torch.tensor(mask.lengths).view(rows, -1).tolist())
    return Mask(mask.layout, lengths, mask.causal)


def contiguous_rows(mask, rows):
    """The mask of the order in which the tokens lie: row after row."""
    return Mask("contiguous", rows_as_ranks(mask, rows).lengths, mask.causal)


def only_in_hybrid(name, mistake):
    return lambda: mock.patch.object(hybrid, name, mistake)


WRONG = {
    "heads of out transposed": exchanges("to_tokens", heads_transposed),
    "K/V head r mod G": lambda: in_both("heads_of_ranks", kv_head_modulo),
    "a copy's gradient counted twice": exchanges("to_tokens", own_copy_twice),
    "gradients of copies not added": exchanges("to_tokens", last_copy_only),
    "the layout is not undone": lambda: in_both("places", order_of_rank),
    "back to the wrong ranks": exchanges("to_tokens", back_to_other_ranks),
    "out goes back in order of rank": exchanges("to_tokens", back_as_they_came),
    "the gradient of out by other heads": exchanges("to_heads", of_other_heads),
    "rows taken for ranks": only_in_hybrid("joined_rows", rows_as_ranks),
    "the mask of contiguous rows": only_in_hybrid("joined_rows", contiguous_rows),
}

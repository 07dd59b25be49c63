"""What the tests of all-to-all and of the hybrid share: many cases in one call on the ranks, and the check of each."""

import functools
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import init_device_mesh

from ringlab.training.all_to_all import all_to_all_attention
from ringlab.training.hybrid import hybrid_attention
from tests.flash_rings import cut, whole
from tests.gradients import gradients
from tests.grouped_queries import assert_four, expected, grouped_inputs
from tests.wrong_exchanges import WRONG


@dataclass(frozen=True)
class Case:
    """H query heads on G, S tokens in contiguous chunks of some lengths or in a layout, and options of the function."""

    heads: int
    kv_heads: int
    tokens: int
    options: dict = field(default_factory=dict)
    lengths: list | None = None
    dtype: torch.dtype = torch.float32
    batch: int = 1
    head_dim: int = 4
    seed: int = 0
    wrong: str | None = None

    @property
    def layout(self):
        return self.options.get("layout", "contiguous")

    def inputs(self):
        return grouped_inputs(
            self.batch, self.heads, self.kv_heads, self.tokens, self.head_dim, self.dtype, seed=self.seed
        )


def attention_of(context, rows):
    """All-to-all; or, with `rows`, the hybrid on a mesh of so many rows, of which the ranks make one a call."""
    if rows is None:
        return all_to_all_attention
    shape = rows, context.world_size // rows
    return functools.partial(hybrid_attention, mesh=init_device_mesh(context.device.type, shape))


def gradients_of_cases(context, cases, rows=None):
    """This rank's chunks of out, dq, dk, dv in each case. The input must stay as it was."""
    attention, results = attention_of(context, rows), []
    for case in cases:
        mine = cut(context, case.layout, case.lengths, *case.inputs())
        before = [x.clone() for x in mine]
        with WRONG[case.wrong]() if case.wrong else nullcontext():
            results.append(gradients(functools.partial(attention, **case.options), *mine))
        assert all(torch.equal(x, y) for x, y in zip(mine, before, strict=True)), "the input changed"
        assert all(x.dtype == case.dtype for x in results[-1])
    return results


def results_of_cases(ranks, world_size, cases, rows=None):
    """The whole out, dq, dk, dv of each case."""
    of_ranks = ranks(world_size, gradients_of_cases, cases, rows)
    return [
        whole(per_rank, case.layout, case.lengths)
        for case, per_rank in zip(cases, zip(*of_ranks, strict=True), strict=True)
    ]


def assert_cases(ranks, world_size, cases, rows=None):
    """out, dq, dk and dv of each case are as near to float64 as rounding allows."""
    for case, results in zip(cases, results_of_cases(ranks, world_size, cases, rows), strict=True):
        options = {name: value for name, value in case.options.items() if name != "layout"}
        try:
            assert_four(results, expected(*case.inputs(), **options))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None

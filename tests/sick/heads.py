"""Rings with a wrong scale, or with the wrong K/V heads."""

from ringlab.training import grouped_query
from ringlab.training.flash_ring import ring_flash_attention
from tests.sick.ring import CAUSAL, MASKED, SickRing
from tests.wrong_rings import GROUPED as WRONG


def scaled(scale_of):
    def attention(q, k, v, *, scale=None, **options):
        return ring_flash_attention(q, k, v, scale=scale_of(scale, q.shape[-1]), **options)

    return attention


def twice(scale, head_dim):
    return head_dim**-1 if scale is None else scale**2


def first_kv_head_only(q, k, v, **options):
    return ring_flash_attention(q, *(x[:, :1].expand_as(x) for x in (k, v)), **options)


def grouped(case):
    return 1 < case.kv_heads < case.heads


def scale(case):
    return case.head_dim**-0.5 if case.scale is None else case.scale


def of_the_chunk(q, k, v, *, scale=None, **options):
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return ring_flash_attention(q, k, v, scale=scale, **options)


def chunk_is_not_head(case):
    return case.scale is None and len(case.positions(0)) != case.head_dim


SICK = {
    "scale_missing": SickRing(scaled(lambda scale, head_dim: 1.0), shows=lambda case: scale(case) != 1, takes=MASKED),
    "scale_ignored": SickRing(
        scaled(lambda scale, head_dim: head_dim**-0.5),
        shows=lambda case: case.scale is not None,
        takes=MASKED,
        in_xray=False,
    ),
    "scale_twice": SickRing(scaled(twice), shows=lambda case: scale(case) != 1, takes=MASKED),
    "scale_of_another_size": SickRing(of_the_chunk, shows=chunk_is_not_head, takes=MASKED, equal_chunks=True),
    "heads_interleaved": SickRing(
        grouped_query.ring_attention, WRONG["head h uses K/V head h mod G"], grouped, in_xray=False
    ),
    "first_kv_head_only": SickRing(
        first_kv_head_only, shows=lambda case: case.kv_heads > 1, takes=CAUSAL, in_xray=False
    ),
}

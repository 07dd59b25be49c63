"""Wrong answers to the exercises of chapter 17, and what each must be told."""

import torch

from notebooks.checks.the_other_ways_round import check_copies, check_kv_head, check_meshes, check_sent


def meshes(possible):
    """An answer to check_meshes: the divisors g of P for which possible(H, G, g)."""
    return lambda P, H, G: [(P // g, g) for g in range(1, P + 1) if P % g == 0 and possible(H, G, g)]


def grouped(copies, G):
    return copies.unflatten(0, (G, -1))


def sent(factor):
    return lambda P, H, G, C, D, w: factor(P, H, G) * C * D * w


WRONG_ANSWERS = [
    (check_kv_head, lambda r, G, P: r % G, "0, 0, 1, 1, not 0, 1, 0, 1"),
    (check_kv_head, lambda r, G, P: r // G, "not G"),
    (check_kv_head, lambda r, G, P: min(r, G - 1), "only the first G ranks"),
    (check_kv_head, lambda r, G, P: r * P // G, "the wrong way round"),
    (check_kv_head, lambda r, G, P: r * G / P, "round down"),
    (check_kv_head, lambda r, G, P: round(r * G / P), "not to the nearest"),
    (check_kv_head, lambda r, G, P: P // G, "the number of ranks with a copy"),
    (check_kv_head, lambda r, G, P: 0, "dealt out to P ranks in order"),
    (check_kv_head, lambda r, G, P: (r + 1) * G // P, "dealt out to P ranks in order"),
    (check_kv_head, lambda r, G, P: [r * G // P], "expected a number, got list"),
    (check_copies, lambda copies, G: grouped(copies, G).mean(dim=1).transpose(0, 1), "do not average"),
    (check_copies, lambda copies, G: grouped(copies, G)[:, 0].transpose(0, 1), "the first copy"),
    (check_copies, lambda copies, G: grouped(copies, G)[:, -1].transpose(0, 1), "the last copy"),
    (check_copies, lambda copies, G: copies.unflatten(0, (-1, G)).sum(dim=0).transpose(0, 1), "on neighbouring ranks"),
    (check_copies, lambda copies, G: copies.sum(dim=0)[:, None].expand(-1, G, -1, -1), "its own copies only"),
    (check_copies, lambda copies, G: grouped(copies, G).sum(dim=1), "B is the first dimension"),
    (check_copies, lambda copies, G: grouped(copies, G).mean(dim=1), "expected shape (5, 2, 4, 3), got (2, 5, 4, 3)"),
    (check_copies, lambda copies, G: copies.transpose(0, 1), "expected shape"),
    (check_copies, lambda copies, G: 2 * grouped(copies, G).sum(dim=1).transpose(0, 1), "off by up to"),
    (check_copies, lambda copies, G: copies.sum().item(), "expected shape (5, 2, 4, 3), got ()"),
    (check_sent, sent(lambda P, H, G: 2 * (H + G)), "of P parts it keeps one"),
    (check_sent, sent(lambda P, H, G: (P - 1) / P * (H + 2 * G)), "out must come back"),
    (check_sent, sent(lambda P, H, G: (P - 1) / P * (2 * H + G)), "two tensors"),
    (check_sent, sent(lambda P, H, G: (P - 1) / P * 4 * H), "k and v have G heads"),
    (check_sent, sent(lambda P, H, G: (P - 1) / P * 4 * G), "q and out have H heads"),
    (check_sent, sent(lambda P, H, G: (P - 1) * 2 * G), "a ring or an all-gather"),
    (check_sent, sent(lambda P, H, G: (P - 1) * 2 * (H + G)), "one part of P"),
    (check_sent, sent(lambda P, H, G: 2 * (H + G) / P), "one message"),
    (check_sent, lambda P, H, G, C, D, w: (P - 1) / P * 2 * (H + G) * C * D, "each has `itemsize` bytes"),
    (check_sent, sent(lambda P, H, G: (P - 1) / P * 4 * (H + G)), "only the forward pass"),
    (check_sent, sent(lambda P, H, G: 1.01 * (P - 1) / P * 2 * (H + G)), "a rank keeps one of P parts"),
    (check_sent, lambda *sizes: None, "expected a number, got NoneType"),
    (check_meshes, meshes(lambda H, G, g: g <= H), "all meshes that work"),
    (check_meshes, meshes(lambda H, G, g: H % g == 0), "needed by several ranks of a row"),
    (check_meshes, meshes(lambda H, G, g: g <= G), "not enough"),
    (check_meshes, meshes(lambda H, G, g: G % g == 0 and g > 1), "the flat ring"),
    (check_meshes, meshes(lambda H, G, g: G % g == 0 and g < 8), "there are more"),
    (check_meshes, meshes(lambda H, G, g: True), "not equal, or with copies"),
    (check_meshes, lambda P, H, G: [(g, P // g) for g in range(1, P + 1) if P % g == 0 == G % g], "wrong way round"),
    (check_meshes, lambda P, H, G: [(1, P), (P, P)], "must be P"),
    (check_meshes, lambda P, H, G: [g for g in range(1, P + 1) if P % g == 0 == G % g], "pairs"),
    (check_meshes, lambda P, H, G: torch.ones(2), "pairs"),
    (check_kv_head, lambda r, G, P: r * G // P if P <= 16 else 0, "right in"),
    (check_copies, lambda copies, G: copies, "expected shape"),
    (check_meshes, lambda P, H, G: {P: 1}, "expected a list of pairs (rows, ranks of a row), got dict"),
    (check_meshes, lambda P, H, G: [(1, P, 1)], "pairs"),
    (check_meshes, lambda P, H, G: ["8 x 1"], "pairs"),
]

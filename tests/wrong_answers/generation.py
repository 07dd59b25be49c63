"""Wrong answers to the exercises of chapter 14, and what each must be told."""

import torch

from notebooks.checks.generation import check_bytes_of_a_token, check_caches, check_merge


def shares(m):
    return torch.exp(m - m.amax(dim=0))


def outputs(l, o):
    return o / l.masked_fill(l == 0, 1.0)[..., None]


def by_largest_m_of_all_heads(m, l, o):
    share = torch.exp(m - m.max())
    return (share[..., None] * o).sum(dim=0) / (share * l).sum(dim=0)[..., None]


def without_a_max(m, l, o):
    return (m.exp()[..., None] * o).sum(dim=0) / (m.exp() * l).sum(dim=0)[..., None]


def merged(m, l, o):
    return (shares(m)[..., None] * o).sum(dim=0) / (shares(m) * l).sum(dim=0)[..., None]


def own_quotients(m, l, o):
    return ((shares(m) * l / (shares(m) * l).sum(dim=0))[..., None] * (o / l[..., None])).sum(dim=0)


def by_e_to_the_m(m, l, o):
    return (m.softmax(dim=0)[..., None] * outputs(l, o)).sum(dim=0)


def largest_alone(m, l, o):
    return outputs(l, o)[m.argmax(dim=0), torch.arange(m.shape[1])]


def in_turn(C, stored, P):
    return [C + len(range(rank, stored, P)) for rank in range(P)]


WRONG_ANSWERS = [
    (check_merge, lambda m, l, o: outputs(l, o).mean(dim=0), "the mean of the ranks' outputs"),
    (check_merge, lambda m, l, o: o.sum(dim=0) / l.sum(dim=0)[..., None], "each rank subtracted its own m"),
    (check_merge, by_e_to_the_m, "not by e^m alone"),
    (check_merge, largest_alone, "the rank with the largest m alone"),
    (check_merge, lambda m, l, o: (shares(m)[..., None] * o).sum(dim=0), "divide it by l"),
    (check_merge, lambda m, l, o: (shares(m)[..., None] * o).sum(dim=0) / l.sum(dim=0)[..., None], "l was not"),
    (check_merge, lambda m, l, o: o.sum(dim=0) / (shares(m) * l).sum(dim=0)[..., None], "o was not"),
    (check_merge, lambda m, l, o: merged(m, l, o) / len(m), "do not divide by the number of ranks"),
    (check_merge, without_a_max, "there are NaNs"),
    (check_merge, by_largest_m_of_all_heads, "the largest m of the same head"),
    (check_merge, own_quotients, "beware of l = 0"),
    (check_merge, lambda m, l, o: (o / l[..., None]).mean(dim=0), "the mean of the ranks' outputs"),
    (check_merge, lambda m, l, o: 1.01 * merged(m, l, o), "off by up to"),
    (check_merge, lambda m, l, o: merged(m, l, o)[0], "expected shape (2, 3), got (3,)"),
    (check_merge, lambda m, l, o: {"out": merged(m, l, o)}, "expected a tensor, got dict"),
    (check_caches, lambda C, N, P: in_turn(C, N, P), "returned and never computed"),
    (check_caches, lambda C, N, P: in_turn(C, N - 1, P)[::-1], "the first ranks have one more"),
    (check_caches, lambda C, N, P: [C + len(range((r - 1) % P, N - 1, P)) for r in range(P)], "token number 0"),
    (check_caches, lambda C, N, P: [C + N - 1] + [C] * (P - 1), "rank 0 fills up alone"),
    (check_caches, lambda C, N, P: [C] * (P - 1) + [C + N - 1], "the last rank fills up alone"),
    (check_caches, lambda C, N, P: [C + N - 1] * P, "it counts P times"),
    (check_caches, lambda C, N, P: [C + N] * P, "and the last one is not stored"),
    (check_caches, lambda C, N, P: [C] * P, "new tokens are stored, too"),
    (check_caches, lambda C, N, P: [C - (-(N - 1) // P)] * P, "the number of slots"),
    (check_caches, lambda C, N, P: [C + (N - 1) // P] * P, "some ranks have one more"),
    (check_caches, lambda C, N, P: [C + (N - 1) / P] * P, "rank n mod P stores"),
    (check_caches, lambda C, N, P: [C + 1 for _ in range(P)], "for n = 0 ... N - 2"),
    (check_caches, lambda C, N, P: C + N - 1, "expected a list of 4 numbers"),
    (check_caches, lambda C, N, P: [C] * 4, "expected a list of 3 numbers"),
    (check_caches, lambda C, N, P: ["C"] * P, "expected a number, got str"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * H * D * 4, "o alone is not enough"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * H * (D + 1) * 4, "one of m and l is missing"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * G * (D + 2) * 4, "H of them, not G"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * (P - 1) * 2 * B * G * C * D * 4, "that is a ring"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * H * (D + 2) * C * 4, "the number of keys"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * H * (D + 2) * P * 4, "once, for any P"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * H * (D + 2) * (P - 1) * 4, "not P - 1 times"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * H * (D + 2) * 4, "there are B of them"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: B * H * (D + 2) * 4, "one layer has that"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * H * (D + 2), "a float32 has 4 bytes"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * H * (D + 2) * 2, "not 2"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: n * B * H * (D + 3) * 4, "wrong in 3 of 3 cases"),
    (check_bytes_of_a_token, lambda n, B, H, G, D, C, P: "4 bytes", "expected a number, got str"),
    (check_caches, lambda C, N, P: {r: C for r in range(P)}, "expected a list of 4 numbers"),
    (check_caches, lambda C, N, P: in_turn(C, N - 1, P) if P <= 5 else [C] * P, "you say"),
    (check_merge, lambda m, l, o: o[0], "4 ranks with (3, 2, 5, 1) keys"),
    (check_merge, lambda m, l, o: merged(m, l, o) if len(m) < 4 else o[0] / l[0][:, None], "4 ranks with"),
]

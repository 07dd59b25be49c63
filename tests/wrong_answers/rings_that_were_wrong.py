"""Wrong answers to the exercises of chapter 16, and what each must be told."""

from dataclasses import replace

from notebooks.checks.rings_that_were_wrong import check_new_mistake, check_ranks, check_xrays
from ring_doctor import mistakes_of_gradients, mistakes_of_merging

NAMES = {
    "A": "stale_first_block",
    "B": "gradients_not_sent_home",
    "C": "averages_averaged",
    "D": "chunk_index_under_zigzag",
    "E": "lse_of_the_block",
}
RANKS = {
    "scale_missing": 1,
    "never_called": 2,
    "keys_of_hop_0": 2,
    "gradients_travel_other_way": 3,
    "lse_not_updated": 3,
    "other_way": 3,
}

WRONG_ANSWERS = [
    (check_xrays, NAMES | {"A": "own_block_twice"}, "KV1 would be right, and the X-ray shows it as missing"),
    (check_xrays, NAMES | {"A": "last_block_skipped"}, "KV0 would be right, and the X-ray shows it as counted twice"),
    (check_xrays, NAMES | {"B": "gradients_travel_other_way"}, "shows it as what belongs to KV(j + 1)"),
    (check_xrays, NAMES | {"B": "stale_first_block"}, "W forward, rank 0, KV0 would be counted twice"),
    (check_xrays, NAMES | {"C": "averages_added"}, "rows would sum to another number, and the X-ray shows 1"),
    (check_xrays, NAMES | {"C": "base_2_as_natural"}, "W backward, rank 0, KV0 would be scaled"),
    (check_xrays, NAMES | {"D": "causal_per_block"}, "KV1 would be a triangle instead of the last half of the queries"),
    (check_xrays, NAMES | {"D": "halves_swapped"}, "D is not halves_swapped: W forward, rank 0, KV0"),
    (check_xrays, NAMES | {"D": "never_called"}, "rank 1, KV0 would be missing"),
    (check_xrays, NAMES | {"E": "delta_of_the_block"}, "W backward, rank 0, KV0 would be right"),
    (check_xrays, NAMES | {"E": "the merge"}, "'the merge' is not in the list"),
    (check_xrays, NAMES | {"E": ...}, "A, B, C, D right; E still open"),
    (check_xrays, list(NAMES.values()), "a dict with the keys A, B, C, D, E"),
    (check_new_mistake, lambda steps: steps, "you replaced no step"),
    (
        check_new_mistake,
        lambda steps: replace(steps, add_q=lambda case, total, part: steps.add_q(case, total, part)),
        "is right",
    ),
    (check_new_mistake, lambda steps: replace(steps, scale=lambda case: 1.0), "the doctor knows it: scale_missing"),
    (check_new_mistake, mistakes_of_merging.base_2_as_natural, "the doctor knows it: base_2_as_natural"),
    (check_new_mistake, mistakes_of_gradients.dk_dv_exchanged, "the doctor knows it: dk_dv_exchanged"),
    (check_new_mistake, lambda steps: 1.0, "expected Steps"),
    (check_new_mistake, lambda steps: replace(steps, scales=None), "your answer ends in TypeError"),
    (check_new_mistake, lambda steps: replace(steps, scale=lambda: 1.0), "your answer ends in TypeError"),
    (check_ranks, RANKS | {"never_called": 1}, "1 rank has one block, and nothing moves"),
    (check_ranks, RANKS | {"lse_not_updated": 2}, "with 2 ranks out is exact"),
    (check_ranks, RANKS | {"other_way": 2}, "with 2 ranks all five results are exact"),
    (check_ranks, RANKS | {"keys_of_hop_0": 3}, "shows with 2 ranks already: wrong in dq, dk"),
    (check_ranks, RANKS | {"scale_missing": 2}, "shows with 1 rank already"),
    (check_ranks, RANKS | {"gradients_travel_other_way": 4}, "shows with 3 ranks already: wrong in dk, dv"),
    (check_ranks, RANKS | {"other_way": "odd"}, "a number of ranks from 1 to 6, got 'odd'"),
    (check_ranks, RANKS | {"other_way": ...}, "still open: other_way"),
    (check_ranks, 3, "a dict with the keys scale_missing"),
    (check_xrays, NAMES | {"A": 7}, "A: 7 is not in the list"),
    (check_xrays, NAMES | {"F": "never_called"}, "a dict with the keys A, B, C, D, E"),
    (check_xrays, "stale_first_block", "a dict with the keys"),
    (check_ranks, RANKS | {"other_way": 2.5}, "a number of ranks from 1 to 6, got 2.5"),
    (check_ranks, RANKS | {"other_way": [3]}, "expected a number, got list"),
    (check_ranks, RANKS | {"other_way": 99}, "a number of ranks from 1 to 6, got 99"),
    (check_ranks, RANKS | {"other_way": True}, "expected a number, got bool"),
    (check_new_mistake, lambda steps: replace(steps, scale=lambda case: "1"), "your answer ends in"),
    (check_new_mistake, lambda steps: None, "expected Steps"),
]

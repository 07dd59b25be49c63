"""Every chapter runs, its committed outputs are current, its solutions are right, its judges reject wrong answers."""

import math
import re

import jupytext
import nbformat
import pytest
import torch

from basics.blocking_messages import Recv, Send
from notebooks import build, checks
from tests.needs_jax import with_jax
from tests.shown import masked

CHAPTERS = build.chapters()
IDS = [source.stem for source in CHAPTERS]
by_chapter = pytest.mark.parametrize("source", CHAPTERS, ids=IDS)


def committed(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def text_outputs(notebook) -> list[list[str]]:
    """What each code cell printed or returned as text; pictures have tests of their own."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = [output for output in cell.outputs if "image/png" not in output.get("data", {})]
            texts.append(masked("".join(output.get("text") or output["data"]["text/plain"] for output in shown)))
    return texts


def test_there_are_chapters():
    assert len(CHAPTERS) >= 4
    assert {path.stem for path in build.FOLDER.glob("*.ipynb")} == {source.stem for source in CHAPTERS}


@by_chapter
def test_the_pair_is_in_step(source):
    assert [(cell.cell_type, cell.source) for cell in jupytext.read(source).cells] == [
        (cell.cell_type, cell.source) for cell in committed(source).cells
    ], "the .py and the .ipynb differ: run make notebooks"


@pytest.mark.parametrize("source", with_jax(CHAPTERS), ids=IDS)
def test_it_runs_and_its_outputs_are_current(source):
    notebook = jupytext.read(source)
    build.execute(notebook)
    for cell, now, before in zip(
        [cell for cell in notebook.cells if cell.cell_type == "code"],
        text_outputs(notebook),
        text_outputs(committed(source)),
        strict=True,
    ):
        assert now == before, f"the output of this cell has changed; run make notebooks:\n{cell.source}"


@by_chapter
def test_it_has_the_form_of_a_chapter(source):
    text = source.read_text()
    for part in ("## The failure", "## The idea", "One number to remember", "## Questions", "## Your turn", "assert "):
        assert part in text, part
    questions = re.search(r"## Questions(.*)## Your turn", text, re.S)[1].count("<details>")
    assert 2 <= questions <= 3
    assert 2 <= len(re.findall(r"print\(checks\.", text)) <= 3
    assert any(
        "image/png" in output.get("data", {}) for cell in committed(source).cells for output in cell.get("outputs", ())
    )


@by_chapter
def test_the_solutions_are_right_and_the_exercises_open(source):
    solutions = re.search(r"Solutions</summary>.*?```python\n(.*?)# ```", source.read_text(), re.S)[1]
    answers = {"torch": torch, "math": math, "Send": Send, "Recv": Recv}
    exec(re.sub(r"(?m)^# ?", "", solutions), answers)
    exercises = re.findall(r"print\(checks\.(\w+)\((\w+)\)\)", source.read_text())
    for check, answer in exercises:
        assert getattr(checks, check)(answers[answer]).startswith("right"), answer
    still_open = sum(lines == [checks.OPEN] for lines in text_outputs(committed(source)))
    assert still_open == len(exercises)


def naive_softmax(scores):
    return scores.exp() / scores.exp().sum()


def no_rescale(m, l, o, scores, v):
    m_new = torch.maximum(m, scores.max())
    p = torch.exp(scores - m_new)
    return m_new, l + p.sum(), o + p @ v


def first_block_only(q, k, v, block_size):
    return torch.softmax(q @ k[:block_size].T / math.sqrt(q.shape[1]), 1) @ v[:block_size]


def delta(out, d_out):
    return (out * d_out).sum(-1, keepdim=True)


def steps(world_size, *whats):
    """The steps of a rank of the overlapped ring, round by round, in this order in each round."""
    return [(what, t) for t in range(world_size - 1) for what in whats] + [("compute", world_size - 1)]


def all_posts_first(step):
    return step[0] != "post", step[1], step[0]


def computes_last(step):
    return step[0] == "compute", step[1], step[0]


def outs_of(kernel, q, k, v, blocks):
    return [kernel(q, k_j, v_j)[0] for k_j, v_j in zip(k.chunk(blocks), v.chunk(blocks), strict=True)]


KV = 2 * 8 * 16384 * 128  # numbers in K and V of a block, with 8 heads of K and V
CHUNK = 32 * 131072 * 128  # numbers in K of a block, with 8 ranks and 2**20 tokens

WRONG_ANSWERS = [
    (checks.safe_softmax, naive_softmax, "subtract the largest score"),
    (checks.safe_softmax, lambda s: torch.softmax(s.clamp(-80, 80), 0), "near 1000"),
    (checks.safe_softmax, lambda s: naive_softmax(s - s.abs().max()), "near -1000"),
    (checks.safe_softmax, lambda s: s.exp(), "small scores"),
    (checks.safe_softmax, lambda s: None, "expected a tensor"),
    (checks.running_update, no_rescale, "rescaled by"),
    (checks.running_update, lambda m, l, o, s, v: (s.max(), l, o), "m is wrong when the max stays"),
    (checks.merge_two, lambda out_a, lse_a, out_b, lse_b: (out_a + out_b, lse_a + lse_b), "in lse"),
    (checks.merge_two, lambda out_a, lse_a, out_b, lse_b: out_a, "ends in ValueError"),
    (checks.merge_two, lambda a, la, b, lb: ((a + b) / 2, torch.logaddexp(la, lb)), "plain average"),
    (checks.merge_two, lambda a, la, b, lb: (a + b, torch.logaddexp(la, lb)), "in out"),
    (checks.blockwise, first_block_only, "in blocks of 1"),
    (checks.blockwise, lambda q, k, v, block_size: q[:3], "expected shape (7, 4), got (3, 4)"),
    (checks.visible_tiles, lambda n: n * n, "that is all of them"),
    (checks.visible_tiles, lambda n: n * (n - 1) // 2, "diagonal"),
    (checks.largest_tensor, 8 * 256 * 256 * 4, "tile of scores"),
    (checks.largest_tensor, 17, "you say 17"),
    (checks.blocks_of_gpu, 2, "ends in TypeError"),
    (checks.blocks_of_gpu, [2, 3, 0, 1], "the other way"),
    (checks.blocks_of_gpu, [0, 1, 2, 3], "its own block"),
    (checks.token_two_after_round_two, (0.120, 4.243, 3.5), "rescale the old l"),
    (checks.token_two_after_round_two, (1.0, 4.243, 1.480), "f is not 1.000"),
    (checks.mended_sum, lambda outs, lses: outs.sum(0), "published sum"),
    (checks.mended_sum, lambda outs, lses: outs.mean(0), "average of averages"),
    (checks.mended_sum, lambda outs, lses: lses @ outs, "softmax(lses)"),
    (checks.block_in_hand, lambda rank, t, world_size: (rank + t) % world_size, "the other way"),
    (checks.block_in_hand, lambda rank, t, world_size: rank, "does not hold KV0"),
    (checks.ring_order, lambda r, P: [Send((r + 1) % P), Recv((r - 1) % P)], "circle: [0, 1]"),
    (checks.ring_order, lambda r, P: [Recv((r - 1) % P)], "must send to its next"),
    (checks.bytes_sent, 8 * 2 * 32 * 131072 * 128 * 2, "8 hops"),
    (checks.bytes_sent, 7 * 32 * 131072 * 128 * 2, "K and V travel"),
    (checks.bytes_sent, 1, "hops x"),
    (checks.softmax_backward, lambda W, dW, out, d_out: W * dW, "delta is missing"),
    (checks.softmax_backward, lambda W, dW, out, d_out: dW - delta(out, d_out), "multiply by the weights"),
    (checks.softmax_backward, lambda W, dW, out, d_out: W * (dW + delta(out, d_out)), "subtracted"),
    (checks.softmax_backward, lambda W, dW, out, d_out: W * (dW - delta(W, dW)), "only the keys of this block"),
    (checks.softmax_backward, lambda W, dW, out, d_out: W * (dW - (d_out * out).sum()), "one delta for all rows"),
    (checks.softmax_backward, lambda W, dW, out, d_out: W * (dW - (d_out * out).sum(-1)), "ends in RuntimeError"),
    (checks.softmax_backward, lambda W, dW, out, d_out: W, "off by up to"),
    (checks.softmax_backward, lambda W, dW, out, d_out: None, "expected a tensor"),
    (checks.added_so_far, lambda rank, t, P: {(rank + i) % P for i in range(t + 1)}, "the other way"),
    (checks.added_so_far, lambda rank, t, P: {(rank - i) % P for i in range(1, t + 1)}, "has just computed"),
    (checks.added_so_far, lambda rank, t, P: {rank - i for i in range(t + 1)}, "remainder by P"),
    (checks.added_so_far, lambda rank, t, P: set(range(P)), "the block came from rank 3"),
    (checks.added_so_far, lambda rank, t, P: rank, "ends in TypeError"),
    (checks.bytes_sent_back, 7 * 4 * CHUNK, "forward pass"),
    (checks.bytes_sent_back, 8 * 8 * CHUNK, "K and V travel too"),
    (checks.bytes_sent_back, 7 * 12 * CHUNK, "one hop more"),
    (checks.bytes_sent_back, 8 * 12 * CHUNK, "need not come home"),
    (checks.bytes_sent_back, (7 + 8) * 4 * CHUNK, "kept in float32"),
    (checks.bytes_sent_back, (7 + 8) * 8 * CHUNK, "2 bytes"),
    (checks.bytes_sent_back, 46 * CHUNK, "count both"),
    (checks.bytes_sent_back, 1, "7 hops of K and V"),
    (checks.overlap_order, lambda P: steps(P, "post", "wait", "compute"), "hides nothing"),
    (checks.overlap_order, lambda P: steps(P, "wait", "post", "compute"), "wait for nothing"),
    (checks.overlap_order, lambda P: [*steps(P, "post", "compute", "wait"), ("post", P - 1)], "nobody sends"),
    (checks.overlap_order, lambda P: steps(P, "post", "wait"), "is there 0 times"),
    (checks.overlap_order, lambda P: [*steps(P, "post", "compute", "wait"), ("rest", 0)], "no step ('rest', 0)"),
    (checks.overlap_order, lambda P: sorted(steps(P, "post", "compute", "wait")), "may not have arrived"),
    (
        checks.overlap_order,
        lambda P: sorted(steps(P, "post", "compute", "wait"), key=all_posts_first),
        "cannot be sent",
    ),
    (
        checks.overlap_order,
        lambda P: sorted(steps(P, "post", "compute", "wait"), key=computes_last),
        "fills the buffer",
    ),
    (checks.overlap_order, lambda P: P, "ends in TypeError"),
    (checks.hidden_by_overlap, lambda computing, messages: computing / messages, "no more than all"),
    (checks.hidden_by_overlap, lambda computing, messages: messages / computing, "turned over"),
    (checks.hidden_by_overlap, lambda computing, messages: max(0, 1 - computing / messages), "not hidden"),
    (checks.hidden_by_overlap, min, "divide it by"),
    (
        checks.hidden_by_overlap,
        lambda computing, messages: min(computing, messages) / (computing + messages),
        "all of it",
    ),
    (checks.hidden_by_overlap, lambda computing, messages: 0.1, "the rest is"),
    (checks.smallest_chunk, 312e12 / 25e9, "only 8 of 32"),
    (checks.smallest_chunk, 4 * 312e12 / 25e9, "a shorter chunk"),
    (checks.smallest_chunk, 6240, "2 bytes"),
    (checks.smallest_chunk, 1560, "K and V travel"),
    (checks.smallest_chunk, 7, "you say 7"),
    (checks.zigzag_positions, lambda r, S, P: [2 * r, 2 * r + 1, 8 + 2 * r, 9 + 2 * r], "counted from the end"),
    (checks.zigzag_positions, lambda r, S, P: list(range(r * S // P, (r + 1) * S // P)), "contiguous layout"),
    (checks.zigzag_positions, lambda r, S, P: range(r, S, P), "striped layout"),
    (checks.zigzag_positions, lambda r, S, P: [14, 15, 0, 1], "rising order"),
    (checks.zigzag_positions, lambda r, S, P: [r], "2 early and 2 late"),
    (checks.striped_mask, lambda rank, block, C: torch.ones(C, C).tril().bool(), "the diagonal is hidden"),
    (checks.striped_mask, lambda rank, block, C: torch.ones(C, C).tril(-(block != rank)).bool(), "is visible"),
    (checks.striped_mask, lambda rank, block, C: torch.ones(C, C).triu(1).bool(), "True for the hidden pairs"),
    (checks.striped_mask, lambda rank, block, C: torch.ones(C, C).triu().bool(), "turned over"),
    (checks.striped_mask, lambda rank, block, C: torch.ones(C, C).bool(), "every tile is a triangle"),
    (checks.striped_mask, lambda rank, block, C: torch.ones(C, C + 1).bool(), "expected shape (4, 4), got (4, 5)"),
    (checks.striped_mask, lambda rank, block, C: torch.eye(C).bool(), "must not be later"),
    (checks.idle_limit, 7 / 8, "rank 7 never waits"),
    (checks.idle_limit, 7 / 16, "round 0 is only half"),
    (checks.idle_limit, 0.5, "limit of many"),
    (checks.idle_limit, 8 / 15, "in which they work"),
    (checks.idle_limit, 0.1, "32 blocks of work"),
    (checks.merging_share, lambda lse, lse_j: torch.sigmoid(lse - lse_j), "merged before"),
    (checks.merging_share, lambda lse, lse_j: lse_j.exp(), "divide by the sum"),
    (checks.merging_share, lambda lse, lse_j: lse_j.exp() / (lse.exp() + lse_j.exp()), "overflows"),
    (checks.merging_share, lambda lse, lse_j: lse_j - lse, "e^lse_j / (e^lse + e^lse_j)"),
    (checks.attention_on_a_kernel, lambda kernel, q, k, v, n: kernel(q, k, v)[0], "expected 3 blocks of 4"),
    (checks.attention_on_a_kernel, lambda kernel, q, k, v, n: sum(outs_of(kernel, q, k, v, n)) / n, "average"),
    (checks.attention_on_a_kernel, lambda kernel, q, k, v, n: sum(outs_of(kernel, q, k, v, n)), "the sum of"),
    (checks.attention_on_a_kernel, lambda kernel, q, k, v, n: outs_of(kernel, q, k, v, n)[0], "after each merge"),
    (checks.bytes_of_training, 4 * 60 * KV, "not with 32"),
    (checks.bytes_of_training, (28 + 16) * KV, "in float32"),
    (checks.bytes_of_training, (28 + 28) * KV, "brings them home"),
    (checks.bytes_of_training, (14 + 32) * KV, "go round twice"),
    (checks.bytes_of_training, 30 * KV, "both gradients"),
    (checks.bytes_of_training, 1, "7 hops of K and V"),
    (checks.training_chunk, 12_480, "enough forwards"),
    (checks.training_chunk, 24_960, "that is F/B"),
    (checks.training_chunk, 29_952, "of G = H without a mask"),
    (checks.training_chunk, 49_920, "only 8 of 32"),
    (checks.peak_memory_of_a_ring, lambda H, G, D, C, w: 6 * H * D * C, "6bch"),
    (checks.training_chunk, 7_488, "its bytes are not"),
    (checks.training_chunk, 6_240, "without a mask"),
    (checks.training_chunk, 59_904, "8 of 32 heads"),
    (checks.training_chunk, 9_984, "2 + 4 bytes"),
    (checks.training_chunk, 37_440, "five products"),
    (checks.training_chunk, 27_456, "the larger one"),
    (checks.training_chunk, 1, "you say 1"),
    (checks.training_chunk, "many", "ends in TypeError"),
    (checks.fewer_bytes, lambda P, H, G: "ring", "= 4 times the bytes"),
    (checks.fewer_bytes, lambda P, H, G: "all-to-all" if P > 2 else "ring", "32 heads of K and V cannot be dealt to 3"),
    (checks.fewer_bytes, lambda P, H, G: "all-to-all" if G % P == 0 else "ring", "0.8 times"),
    (checks.fewer_bytes, lambda P, H, G: "all-to-all" if G % P == 0 and P * G >= H + G else "ring", "as many bytes"),
    (checks.fewer_bytes, lambda P, H, G: "ring" if P <= 8 and (P, G) != (8, 32) else "all-to-all", "1.6 times"),
    (checks.fewer_bytes, lambda P, H, G: "Ulysses", 'expected "ring"'),
    (checks.unlike_links, lambda computing, hops: len(hops) * max(computing, *hops), "last round only computes"),
    (
        checks.unlike_links,
        lambda computing, hops: computing + (len(hops) - 1) * (computing + max(hops)),
        "the longer of the two",
    ),
    (
        checks.unlike_links,
        lambda computing, hops: computing + (len(hops) - 1) * max(computing, sum(hops) / len(hops)),
        "not the average",
    ),
    (
        checks.unlike_links,
        lambda computing, hops: computing + sum(max(computing, hop) for hop in hops[1:]),
        "every round",
    ),
    (checks.unlike_links, lambda computing, hops: len(hops) * computing, "computing alone"),
    (checks.unlike_links, lambda computing, hops: 1.0, "it is 8 s"),
    (checks.peak_memory_of_a_ring, lambda H, G, D, C, w: 6 * H * D * C * w, "G heads, not H"),
    (checks.peak_memory_of_a_ring, lambda H, G, D, C, w: (2 * H + 4 * G) * D * C, "itemsize"),
    (checks.peak_memory_of_a_ring, lambda H, G, D, C, w: (2 * H + 2 * G) * D * C * w, "arrive while"),
    (checks.peak_memory_of_a_ring, lambda H, G, D, C, w: (H + 4 * G) * D * C * w, "both q and out"),
    (checks.peak_memory_of_a_ring, lambda H, G, D, C, w: (2 * H + 3 * G) * D * C * w, "four of G heads"),
    (checks.peak_memory_of_a_ring, lambda H, G, D, C, w: D * C * w, "q and out of H heads"),
    (checks.peak_memory_of_a_ring, lambda H, G: H, "ends in TypeError"),
    (checks.longest_sequence, lambda memory, state, token, P: P * int((memory - state) / token), "shared out"),
    (checks.longest_sequence, lambda memory, state, token, P: P * int(memory / token), "take room too"),
    (checks.longest_sequence, lambda memory, state, token, P: int((memory - state / P) / token), "there are P"),
    (checks.longest_sequence, lambda memory, state, token, P: int((P * memory - state) / token), "round down on each"),
    (checks.longest_sequence, lambda memory, state, token, P: (P * memory - state) / token, "round down on each"),
    (checks.longest_sequence, lambda memory, state, token, P: P * int((memory - state / P) / token), "0, not less"),
    (
        checks.longest_sequence,
        lambda memory, state, token, P: P * -int((state / P - memory) // token),
        "part of a token",
    ),
    (checks.longest_sequence, lambda memory, state, token, P: 7, "memory - state / P"),
    (checks.devices_needed, 4e6 * 344_064 / 80e9, "add its 90.2e9"),
    (checks.devices_needed, 18, "too few"),
    (checks.devices_needed, (90.2e9 + 4e6 * 344_064) / 80e9, "round up"),
    (checks.devices_needed, 20, "after adding"),
    (checks.devices_needed, 1, "(state + tokens"),
    (checks.pairs_of_a_hop, lambda P: [(i, i + 1) for i in range(P)], "after the last comes the first"),
    (checks.pairs_of_a_hop, lambda P: [(i, (i - 1) % P) for i in range(P)], "the other way"),
    (checks.pairs_of_a_hop, lambda P: [(i, i) for i in range(P)], "nobody moves"),
    (checks.pairs_of_a_hop, lambda P: [(i, i + 1) for i in range(P - 1)], "the circle is open"),
    (checks.pairs_of_a_hop, lambda P: [(0, i) for i in range(P)], "send once and receive once"),
    (checks.pairs_of_a_hop, lambda P: P, "ends in TypeError"),
    (checks.scan_in_python, lambda body, carry, xs: ([], carry), "the last carry first"),
    (checks.scan_in_python, lambda body, carry, xs: (body(carry, xs[-1])[0], []), "of the round before"),
    (checks.scan_in_python, lambda body, carry, xs: (carry + sum(xs), list(xs)), "second result"),
    (checks.scan_in_python, lambda body, carry, xs: (16, [10, 11, 13]), "with no rounds"),
    (checks.scan_in_python, lambda body, carry, xs: carry, "ends in TypeError"),
    (checks.arrays_passed_on, lambda P: 2 * (P - 1), "that is the forward pass"),
    (checks.arrays_passed_on, lambda P: 6 * (P - 1), "home"),
    (checks.arrays_passed_on, lambda P: 6 * P, "need not come home"),
    (checks.arrays_passed_on, lambda P: 2 * (P - 1) + 2 * P, "must come again"),
    (checks.arrays_passed_on, lambda P: 3 * P - 2, "two arrays"),
    (checks.arrays_passed_on, lambda P: 1, "P hops"),
]


@pytest.mark.parametrize(("check", "answer", "reason"), WRONG_ANSWERS)
def test_a_wrong_answer_is_told_why(check, answer, reason):
    said = check(answer)
    assert said.startswith("not yet: ")
    assert reason in said

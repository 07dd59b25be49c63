"""The workshop: a right file passes its step, a wrong one is told what the doctor says, and a ring must be a ring."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from notebooks.your_ring import checks
from ring_doctor.asking.case import Case
from ringlab.support.messages import Message, Watch
from tests.commands import ROOT

pytestmark = pytest.mark.slow  # the doctor starts processes
FIRST, SIXTH = checks.solution(1), checks.solution(6)


def one_more(to):
    """A right ring, but of 4 ranks rank 1 sends its K to another one once more."""
    return f"""{SIXTH}
def attention(q, k, v):
    out, sender, receiver = ring_attention(q, k, v), 1, {to}
    if dist.get_world_size() == 4 and dist.get_rank() == sender:
        dist.send(k, receiver)
    if dist.get_world_size() == 4 and dist.get_rank() == receiver:
        dist.recv(torch.empty_like(k), sender)
    return out
"""


NO_GROUPS = """
def attention(q, k, v, causal=False, layout="contiguous"):
    return ring_attention(*torch.stack((q, k, v)), causal, layout)
"""
WRONG = [  # step, file, what is said
    (1, "attention: int = 1", "expected a function"),
    (2, one_more(3), "rank 1 are right. But it exchanged a message with rank 3"),
    (2, one_more(2), "a rank sends too much: "),
    (4, one_more(2), "attention has no argument causal"),
    (6, f"{SIXTH}{NO_GROUPS}", "it does not take P = "),
]


@pytest.mark.parametrize(("number", "file"), [(1, FIRST), (6, SIXTH)], ids=lambda x: "file" if "\n" in str(x) else None)
def test_a_right_file_passes_its_step(number, file, tmp_path):
    path = tmp_path / f"right_{number}.py"
    path.write_text(file)
    assert checks.step(number, path, 30).endswith(": right")


def test_a_first_try_is_told_its_mistake():
    """The notebook has all six."""
    said = checks.first_try(4)
    assert ": not yet: the doctor says\n\nSICK: causal_per_block" in said
    assert str(ROOT) not in said
    assert "/tmp" not in said


@pytest.mark.parametrize(("number", "file", "words"), WRONG, ids=lambda x: "file" if "\n" in str(x) else None)
def test_a_wrong_file_is_told_why(number, file, words, tmp_path):
    path = tmp_path / f"of_{tmp_path.name}.py"  # Python keeps one module of a name
    path.write_text(file)
    said = checks.step(number, path, 30)
    assert ": not yet: " in said
    assert words in said


def test_a_file_that_was_changed_is_read_again(tmp_path):
    path = tmp_path / ".." / tmp_path.name / "once_written.py"
    assert "once_written.py is not there" in checks.step(1, path)
    path.write_text("def attention(q, k, v):\n    return q")
    assert "expected 2 values (out, lse), got Tensor" in checks.step(1, path)
    path.write_text(FIRST)
    assert checks.step(1, path) == "step 1 · one block: right"
    with pytest.raises(ValueError, match="there is no step 7; expected a number from 1 to 6"):
        checks.step(7, path)


def test_a_ring_that_takes_any_option_takes_a_layout(tmp_path):
    (path := tmp_path / "takes_all.py").write_text("def attention(q, k, v, **options): return q")
    with mock.patch.object(checks, "_examined", return_value=""):
        assert checks.step(5, path) == "step 5 · zigzag: right"


def gathered(context):
    """What is noted of a collective of 8 bytes a rank, and of messages of 12 bytes in a part of the job."""
    r, P = context.rank, context.world_size
    part = dist.new_group([0, 2])
    with Watch() as watch:
        dist.all_gather_into_tensor(torch.empty(2 * P), torch.ones(2))
        if r != 1:
            sent = dist.isend(torch.ones(3), 2 - r, group=part)
            dist.recv(torch.empty(3), 2 - r, group=part)
            sent.wait()
    return {(each.kind, each.peer, each.bytes) for each in watch.messages}


def test_of_a_collective_the_largest_tensor_counts(ranks):
    for rank, of_rank in enumerate(ranks(3, gathered)):
        assert {size for kind, _, size in of_rank if "gather" in kind} == {24}  # not the 8 bytes of the smallest
        single = {(kind, peer, size) for kind, peer, size in of_rank if kind in ("send", "recv")}
        assert single == ({(kind, 2 - rank, 12) for kind in ("send", "recv")} if rank != 1 else set())


@pytest.mark.parametrize(("number", "hops"), [(2, 3), (3, 3 + 3 + 4), (6, 3 + 3 + 4)])
def test_so_many_hops_and_no_byte_more(number, hops):
    """4 ranks: K and V, and backward K and V again, and dK and dV to their home; of 6 tokens, 2 heads of 5 numbers."""
    case = Case(4, 24, batch=3, heads=4, kv_heads=2, head_dim=5, dtype=torch.float32)
    block = 2 * 3 * 2 * 6 * 5 * 4
    assert checks.too_much(number, case, hops * block) == ""
    assert f"{hops} hops of a block take {hops * block:,}" in checks.too_much(number, case, hops * block + 1)


def test_a_collective_and_a_message_across_the_ring_are_told_and_none_to_a_neighbour():
    def told(kind, peer, size=96):
        return checks.elsewhere(checks.carrying([Message(kind, peer, size)]), 0, 4)

    assert told("send", 1) == told("recv", 3) == told("recv any", None) == told("allgather", None, 64) == ""
    assert "rank 2 (96 bytes)" in told("send", 2)
    assert "a collective, allgather (65 bytes)" in told("allgather", None, 65)

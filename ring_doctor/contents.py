"""What a wrong result holds: the right numbers times a factor, in other places, of another result, parts of a sum.

    for pattern in CONTENTS: pattern.common(answers, "dk")    ->    what is true of dk in each of these wrong answers

Each pattern compares a whole result with what it would be, within rounding. Random numbers fit none.

Shapes: those of wrong_answer.py.

Before: factors.py, moves.py and sums.py. After: places.py, where a result is wrong; inference.py, all that is told.
Source: none.
"""

from collections.abc import Iterator

import torch

from ring_doctor import factors, moves, sums
from ring_doctor.patterns import Found, Pattern, pattern
from ring_doctor.wrong_answer import QUERY_ROWS, WrongAnswer


@pattern("In {x} numbers are NaN or infinite {words}")
def not_finite(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    seen, case = wrong.seen(name), wrong.case
    bad = ~seen.isfinite() & wrong.exact(name).isfinite()
    if not bad.any():
        return
    yield Found("in some places", order=2)
    if bad.all():
        yield Found("everywhere", order=1)
    if case.inputs == "large":
        look = "exp: e^s overflows unless the largest score of the row is subtracted first"
        yield Found("where scores are large", look)
    rows = bad.flatten(3).any(dim=3) if bad.dim() == 4 else bad
    if name in QUERY_ROWS and not case.visible().all():
        tiles = [case.visible()[:, case.positions(block)].any(dim=1) for block in range(case.world_size)]
        sees_none, lacks_one = ~case.visible().any(dim=1), ~torch.stack(tiles).all(dim=0)
        if sees_none.any() and (rows == sees_none).all():
            yield Found("in the queries that see no key", "the division by l, which is 0 there")
        elif (rows == lacks_one).all() and lacks_one.sum() > 1:
            look = "the merge of a block of which a query sees no key: -inf - (-inf) is NaN"
            yield Found("in the queries that see no key of some block", look)
        elif rows[:, :, 0].all() and not rows[:, :, 1:].any():
            yield Found("in the first query of the sequence", "the mask: this query sees its own key, and no other key")


@pattern("In {x} all numbers are {words}")
def zero(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    if wrong.near(name, torch.zeros_like(wrong.exact(name))):
        yield Found("0", "detach, no_grad, .data, and a buffer that is returned before it is filled")


RETURNED = "the order in which the results are returned or unpacked, and buffers that two of them share"


@pattern("The numbers of {x} are those of {words}")
def another_result(wrong: WrongAnswer, name: str) -> Iterator[Found]:
    others = {f"the right {x}": wrong.exact(x) for x in wrong.right if x != name}
    others |= {f"the input {x}": value for x, value in wrong.inputs.items()}
    others |= {"dk + dv": wrong.exact("dk") + wrong.exact("dv")} if "dk" in wrong.right else {}
    for words, x in others.items():
        if wrong.near(name, x):
            yield Found(words, RETURNED)


def rounded(wrong: WrongAnswer, name: str) -> Iterator[Found] | None:
    """Errors as small as roundings, in a dtype that is wider. Roundings move most numbers, each by a little."""
    seen, exact = wrong.seen(name), wrong.exact(name)
    if torch.finfo(wrong.case.dtype).bits <= 16:
        return None
    finite = exact.isfinite() & wrong.bad(name).view(*seen.shape[:3], *[1] * (seen.dim() - 3))
    error, typical = (seen - exact)[finite].abs(), float(exact[finite].square().mean().sqrt())
    found = []
    for order, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        eps, named = torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")
        if eps <= torch.finfo(wrong.case.dtype).eps:
            continue
        if torch.equal(seen, seen.to(dtype).double()):
            words = f"every number is one that {named} can hold"
            found.append(Found(words, f"where the result becomes {named}", order))
        if bool((error <= 4 * eps * (exact[finite].abs() + typical)).all()) and error.median() > eps / 100 * typical:
            size = "float32" if dtype == torch.float32 else "16 bits"
            look = f"casts to {size}: of messages, of buffers, and of sums over blocks"
            found.append(Found(f"the errors are as small as roundings to {size}", look, 5 - order))
    return iter(found)


CONTENTS = (  # the first that holds says the most
    not_finite,
    zero,
    another_result,
    factors.factor,
    factors.shifted_lse,
    moves.another_rank,
    moves.another_head,
    moves.other_kv_heads,
    moves.another_place,
    factors.factor_of_the_rank,
    factors.factor_of_the_head,
    factors.factor_of_the_row,
    sums.parts_of_a_sum,
    sums.wrong_delta,
    sums.wrong_d_out,
    sums.other_rows,
    Pattern("{x}: {words}", rounded),
)

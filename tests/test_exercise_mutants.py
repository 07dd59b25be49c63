"""Each solution with one thing changed is refused: an operator, a number, a name, one side of a max, a condition."""

import ast
import copy

import pytest

from tests.test_exercises import CHECKS, EXERCISES, check_named, solution, solution_code, solutions

OTHERS = {
    **{ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div, ast.Add], ast.Div: [ast.Mult]},
    **{ast.FloorDiv: [ast.Mult], ast.Mod: [ast.FloorDiv], ast.Pow: [ast.Mult]},
    **{ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt], ast.Gt: [ast.GtE], ast.GtE: [ast.Gt], ast.Eq: [ast.NotEq]},
    **{ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is], ast.NotIn: [ast.In]},
}
# Mutants that are right, too: a part of the text of each.
RIGHT_TOO = {
    # q, k and v have one shape, and any column of q has that of lse
    "check_attention_on_a_kernel": "q[:, -1] | q[:, 1] | zeros_like(k) | zeros_like(v) | full_like(k | full_like(v",
    "check_blockwise": "full((len(k) | full((len(v) | zeros(len(k)) | zeros(len(v)) | zeros_like(k) | zeros_like(v) | "
    "range(0, len(q) | range(0, len(v) | sqrt(k.shape | sqrt(v.shape",
    "check_mended_sum": "softmax(lses, -1)",  # it has one axis
    "check_meshes": "range(1, H + 1) | range(1, G + 1) | range(1, P + 2)",  # the conditions leave out the rest
    "check_natural_lse": "<= 1.2",  # the lse is 1 or 1.4427
    "check_ring_order": "rank % 2 != 0 | rank + 0 == 0 | rank % 2 == 1 | rank % 3 == 0",  # some send first, some last
    "check_shard_by_hand": "(0, 2) | labels.shape",  # a column more, which no rank takes; the shape of tokens
    "check_softmax_backward": "dim=+1",  # the last of two axes
}


def changes(node, names):
    """Functions that change a node of this kind in place."""
    if isinstance(node, ast.BinOp):
        yield from (lambda it, op=op: setattr(it, "op", op()) for op in OTHERS.get(type(node.op), []))
        yield lambda it: (setattr(it, "op", ast.Add()), setattr(it, "right", ast.Constant(0)))
        yield lambda it: (setattr(it, "op", ast.Add()), setattr(it, "left", ast.Constant(0)))
    if isinstance(node, ast.Compare):
        yield from (lambda it, op=op: it.ops.__setitem__(0, op()) for op in OTHERS.get(type(node.ops[0]), []))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from (lambda it, by=by: setattr(it, "value", it.value + by) for by in (1, -1))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("min", "max"):
        for i, kept in enumerate(node.args):
            if not isinstance(kept, ast.Starred):
                yield lambda it, i=i: setattr(it, "args", [ast.List([it.args[i]], ast.Load())])
    if isinstance(node, ast.IfExp):
        yield lambda it: setattr(it, "body", it.orelse)
        yield lambda it: setattr(it, "orelse", it.body)
    if isinstance(node, ast.BoolOp):
        yield lambda it: setattr(it, "op", ast.Or() if isinstance(it.op, ast.And) else ast.And())
        yield lambda it: setattr(it, "values", it.values[:1])
        yield lambda it: setattr(it, "values", it.values[1:])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield lambda it: setattr(it, "op", ast.UAdd())
    if isinstance(node, ast.Name) and node.id in names:
        yield from (lambda it, name=name: setattr(it, "id", name) for name in names if name != node.id)


def mutants(function):
    """The source of the function with one change, for all changes."""
    names = sorted(argument.arg for argument in function.args.args)
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    for i, node in enumerate(nodes):
        for change in changes(node, names):
            mutant = copy.deepcopy(function)
            change([node for statement in mutant.body for node in ast.walk(statement)][i])
            yield ast.unparse(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in EXERCISES if callable(solution(check))])
def test_a_solution_with_one_change_is_refused(check):
    if check == "check_new_mistake":
        pytest.skip("its solution is a mistake, and so is one with a change")
    chapter, answer = CHECKS[check]
    (function,) = (node for node in ast.parse(solution_code(chapter)).body if getattr(node, "name", "") == answer)
    right, accepted, refused = ast.unparse(function), [], 0
    for mutant in set(mutants(function)) - {right}:
        names = dict(solutions(chapter))
        exec(mutant, names)
        if check_named(check)(names[answer]).startswith("right"):
            accepted.append(mutant)
        else:
            refused += 1
    known = RIGHT_TOO[check].split(" | ") if check in RIGHT_TOO else []
    assert [text for text in accepted if not any(part in text for part in known)] == []
    assert refused > 2

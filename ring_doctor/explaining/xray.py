"""With V = the identity, a ring returns the matrix of weights that it used: an X-ray of the ring.

    out = W V         with V = I     out = W
    dV = Wᵀ dO        with dO = I    dV = Wᵀ                          W = softmax(scale Q Kᵀ)
    dQ = scale dS K   with K = I     dQ = scale dS                    dS = W ∘ (dO Vᵀ - δ),  δ = Σ dO ∘ out
    dK = scale dSᵀ Q  with Q = I     dK = scale dSᵀ

Two runs show all four, see asking/probes.py. The out of a ring of states is linear in V too: with V = I it is how much
of each earlier token a row reads. One run shows that.

Shapes: S tokens on P ranks; Q, K, V, dO (1, 1, S, D) with D ≥ S, one head. A tile of W or dS is the pairs of rank r's
queries and block j's keys, computed in round t = (r - j) mod P. If a block is missing, all other weights of a row are
larger by one factor. The other tiles are not wrong, so a row is compared with the right row times its factor.

Before: asking/case.py, tiles.py and grids.py. After: xray_picture.py.
Source: none; the equations are those of Dao et al. 2022, algorithm 4.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ring_doctor.asking.case import RUNS, Case
from ring_doctor.explaining.grids import Matrix, XRay
from ring_doctor.explaining.tiles import Sheet, Tile, factor, likeliest
from ring_doctor.mistakes.paper_ring import RIGHT, Steps, compute
from ringlab.support.rounding import exact_attention


def cases(case: Case) -> tuple[Case, Case]:
    """The two questions that make an X-ray of a ring with this mask, layout, dtype and scale: for `xray_of`."""
    one_head = replace(case, batch=1, heads=1, kv_heads=1, head_dim=max(case.seq_len, case.head_dim))
    first, second = (replace(one_head, inputs=run) for run in RUNS)
    return first, second


def of_states(out: Tensor, case: Case) -> XRay:
    """The X-ray of a ring of states: what a row reads of each token, the out (1, 1, S, D) of the second of `cases`."""
    right, whole = case.right()["out"], replace(case, documents=None).right()["out"]
    sheet = _sheet(case, *(x[0, 0].double()[:, : case.seq_len] for x in (out, whole.exact, right.allowed)))
    return XRay([Matrix("A of states", sheet, likeliest([sheet]))], case)


def _sheet(case: Case, seen: Tensor, full: Tensor, allowed: Tensor) -> Sheet:
    """The sheet of matrices whose tokens are in the order of the sequence."""
    chunks = [case.positions(rank) for rank in range(case.world_size)]
    order = torch.cat(chunks)
    return Sheet(tuple(map(len, chunks)), *(x[order][:, order] for x in (seen, full, case.visible(), allowed)))


def read_matrices(run_1: Mapping[str, Tensor], run_2: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The matrices (S, S), float64, that the results of two runs show, by the names of `grids.TITLES`.

    A result that is missing shows no matrix.
    """
    shown = {
        "W forward": (run_2, "out", False, 1.0),
        "W backward": (run_1, "dv", True, 1.0),
        "dS in dQ": (run_1, "dq", False, scale),
        "dS in dK": (run_2, "dk", True, scale),
    }
    found = {}
    for name, (run, result, transposed, times) in shown.items():
        if run.get(result) is not None:
            x = run[result][0, 0].double()[:, : run[result].shape[2]] / times
            found[name] = x.T if transposed else x
    return found


def _right(case: Case, scale: float) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """The right weights and dP of every pair, as if it were visible, δ, and how far rounding may move each matrix.

    All in the order of the sequence: (S, S), (S, S), (S, 1), {name: (S, S)}.
    """
    runs, visible = [run.whole() for run in cases(case)], case.visible()
    q, k, v, d_out = (x[0, 0].double() for x in runs[0])
    scores = scale * q @ k.T
    every_lse = scores.logsumexp(dim=1, keepdim=True)
    lse = scores.masked_fill(~visible, -torch.inf).logsumexp(dim=1, keepdim=True)
    lse = torch.where(lse == -torch.inf, every_lse, lse)  # a row that sees nothing
    weights, d_p = (scores - lse).exp(), d_out @ v.T

    def rounding(seen: Tensor) -> dict[str, Tensor]:
        wide = torch.float32 if case.dtype == torch.float64 else case.dtype  # a patient may compute in float32
        exact = partial(exact_attention, visible=seen, scale=scale, fused_blocks=case.world_size)
        first, second = (exact(*(x.to(wide) for x in run)) for run in runs)
        allowed_1, allowed_2 = ({name: right.allowed for name, right in run.items()} for run in (first, second))
        return read_matrices(allowed_1, allowed_2, scale)

    of_every_pair = rounding(torch.ones_like(visible))
    larger = (every_lse - lse).exp()  # how much larger weights are when some pairs are hidden
    allowed = {name: torch.maximum(x, larger * of_every_pair[name]) for name, x in rounding(visible).items()}
    return weights, d_p, (visible * weights * d_p).sum(dim=1, keepdim=True), allowed


def xray_of(run_1: Mapping[str, Tensor], run_2: Mapping[str, Tensor], case: Case) -> XRay:
    """The X-ray of a patient from its whole results {"out", "dq", "dk", "dv"}, each (1, 1, S, D) in any dtype.

    `run_1` and `run_2` are the results of `cases(case)`. Results may be missing: the gradients, or those of a run that
    failed ({}). Their matrices are left out.
    """
    scale = RIGHT.scale(cases(case)[0])
    weights, d_p, delta, allowed = _right(case, scale)
    shown = read_matrices(run_1, run_2, scale)
    found: list[Matrix] = []
    factors = [[(1.0, 0.0)] * case.seq_len]  # what the weights of rows may be multiplied by
    of_keys: list[tuple[float, float]] = []  # the same, if some keys count more often than others

    def tiles_of(sheets: list[Sheet]) -> list[Tile]:
        for sheet in sheets:
            tiles = likeliest([_times_rows(sheet, of_keys)])
            if {"keys"} <= {tile.kind for tile in tiles} <= {"ok", "keys"}:
                return tiles
        return likeliest(_times_rows(sheet, of_rows) for of_rows in factors for sheet in sheets)

    for name in ("W forward", "W backward"):
        if name in shown:
            sheet = _sheet(case, shown[name], weights, allowed[name])
            factors = [[_row_factor(sheet, row) for row in range(case.seq_len)], *factors]
            of_keys = of_keys or _keys_factors(sheet)
            c, tiles = _times_scores(sheet), tiles_of([sheet])
            if c != 1:
                said = f"s x {c:.3g}", f"the scores are {c:.4g} times the right scores"
                tiles = [tile if tile.kind == "ok" else Tile(tile.rank, tile.block, "scores", *said) for tile in tiles]
            found.append(Matrix(name, sheet, tiles))
    for name, run, of_run in (("dS in dQ", run_1, 0), ("dS in dK", run_2, 1)):
        if name in shown:
            deltas = [delta]
            if run.get("out") is not None:  # a right backward pass makes this of a wrong forward pass
                d_out = cases(case)[of_run].whole()[3][0, 0].double()
                deltas.append((run["out"][0, 0].double() * d_out).sum(dim=1, keepdim=True))
            sheets = [_sheet(case, shown[name], weights * (d_p - delta), allowed[name]) for delta in deltas]
            found.append(Matrix(name, sheets[0], tiles_of(sheets)))
    return XRay(found, case)


def _row_factor(sheet: Sheet, row: int) -> tuple[float, float]:
    """(c, how far rounding may move c): in the right tiles of a query the weights are c times the right weights.

    c is 1, or the factor of most tiles of the row. Where the row sums to 1, c may also be a factor with which all other
    tiles are missing or counted twice.
    """
    tensors = (sheet.seen, sheet.full, sheet.visible, sheet.allowed)
    ratios: list[tuple[float, float] | None] = []
    for seen, full, visible, allowed in zip(*(x[row].split(sheet.lengths) for x in tensors), strict=True):
        there = visible & ~(seen.abs() <= allowed)
        if visible.any():
            ratios.append(factor(seen[there], full[there], allowed[there]) if there.any() else (0.0, 0.0))

    def count(c: float, off: float) -> int:
        return sum(x is not None and abs(x[0] - c) <= x[1] + off for x in ratios)

    normal = (sheet.seen[row].sum() - sheet.right[row].sum()).abs() <= sheet.allowed[row].sum()
    best, most = (1.0, 0.0), count(1.0, 0.0)
    for c, off in (x for x in ratios if x and x[0] > 0):
        same, missing_or_twice = count(c, off), ratios.count((0.0, 0.0)) + count(2 * c, 2 * off)
        majority = 2 * same > len(ratios) and (normal or same < len(ratios))
        if same > most and (majority or (normal and same + missing_or_twice == len(ratios))):
            best, most = (c, off), same
    return best


def _times_scores(sheet: Sheet) -> float:
    """c, where the weights are those of c times the right scores; 1 where they are not, or are right.

    In a row log w is the score and a number, so c is the slope: Σ log w' log w / Σ (log w)², both without their means.
    """
    if (sheet.seen.where(sheet.visible, 1.0) <= 0).any() or ((sheet.seen - sheet.right).abs() <= sheet.allowed).all():
        return 1.0
    n = sheet.visible.sum(dim=1, keepdim=True).clamp(min=1)
    logs = [x.where(sheet.visible, 1.0).log() for x in (sheet.seen, sheet.full)]
    seen, right = ((x - x.sum(dim=1, keepdim=True) / n) * sheet.visible for x in logs)
    c = float((seen * right).sum() / right.square().sum())
    expected = (c * right).masked_fill(~sheet.visible, -torch.inf).softmax(dim=1).nan_to_num()
    return c if ((sheet.seen - expected).abs() <= 4 * max(1.0, abs(c)) * sheet.allowed).all() else 1.0


def _keys_factors(sheet: Sheet) -> list[tuple[float, float]]:
    """`_row_factor` of all rows, if a few keys count more or less often: as often for each query, and others once.

    The row that sees the most keys shows how often each counts.
    """
    ratio, off = (x.div(sheet.full).where(sheet.visible, torch.nan) for x in (sheet.seen, 2 * sheet.allowed))
    widest = ratio[sheet.visible.sum(dim=1).argmax()]
    c = (ratio / widest * widest.nanmedian()).nanmedian(dim=1).values.nan_to_num(nan=1.0)
    return list(zip(c.tolist(), off.nanmedian(dim=1).values.nan_to_num().tolist(), strict=True))


def _times_rows(sheet: Sheet, factors: list[tuple[float, float]]) -> Sheet:
    c, off = torch.tensor(factors, dtype=torch.float64).T[:, :, None]
    return replace(sheet, full=c * sheet.full, allowed=c.clamp(min=1) * sheet.allowed + off * sheet.full.abs())


def on_paper(case: Case, steps: Steps = RIGHT) -> XRay:
    """The X-ray of a ring on paper, right or with a mistake: see mistakes/paper_ring.py."""
    first, second = (compute(run, steps) for run in cases(case))
    return xray_of(first, second, case)

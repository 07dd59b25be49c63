"""bench/compare.py names what moved by more than the noise, and nothing else. Nothing is timed."""

import copy
import json
import math
import shutil
import subprocess

import numpy as np
import pytest

from bench import compare, record
from bench.compare import report

ON = {"system": "Linux x86_64", "cores": 2, "cpu": "one of 2026", "torch": "2.13"}
THREE = [0.5, 0.7, 0.9]


def results(rows, machine=ON, **sizes):
    """Of generation: a row for each {method: seconds}."""
    rows = [{"world_size": 2, "context": 1024 * (i + 1), "seconds": row} for i, row in enumerate(rows)]
    command = "python -m bench.generation"
    made = {"command": command, "machine": machine, "dtype": "float32", "reference": "one process"}
    return {**made, "heads": 8, **sizes, "rows": rows}


def timed(seed, repetitions=9, noise=0.03, busy=0.5, rows=12):
    """Two methods, at 1/2 and 1/4 of the speed of one process. `busy`: a disturbance that all three share."""
    random = np.random.default_rng(seed)

    def row():
        common = np.exp(random.normal(0, busy, repetitions))
        each = {"ring": 2, "loop": 4, "one process": 1}
        return {name: (x * common * np.exp(random.normal(0, noise, repetitions))).tolist() for name, x in each.items()}

    return [row() for _ in range(rows)]


def slower(rows, at, method, factor):
    """A copy in which a method takes `factor` times as long in row `at`."""
    rows = copy.deepcopy(rows)
    rows[at][method] = [factor * second for second in rows[at][method]]
    return rows


def moves(committed, fresh):
    """(context / 1024 - 1, method, direction) of what moved."""
    rows = report("generation", results(committed), results(fresh))[0]
    return [(int(row.what.split("S=")[1]) // 1024 - 1, row.method, row.moved) for row in rows if row.moved]


@pytest.mark.parametrize("repetitions", [5, 20])
@pytest.mark.parametrize(("factor", "direction", "method"), [(1.3, "down", "ring"), (1 / 1.3, "up", "loop")])
def test_what_moved_by_ten_times_the_noise_is_named(repetitions, factor, direction, method):
    """What disturbs all methods of a turn alike, by factors of e², disturbs no ratio."""
    for seed in range(3):
        before, after = (timed(each, repetitions, busy=2.0) for each in (seed, 100 + seed))
        said = moves(before, slower(after, 7, method, factor))
        assert (7, method, direction) in said
        assert [move for move in said if move != (7, method, direction)] == moves(before, after)


def test_interval():
    """Tables of the sign test: with 95 %, the median is between the k-th smallest and k-th largest."""
    for repetitions, k in {1: 1, 5: 1, 6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 14: 3, 15: 4, 17: 5, 20: 6, 25: 8}.items():
        x = np.random.default_rng(0).permutation(repetitions).astype(float)
        assert compare.interval(x) == (k - 1, repetitions - k)


def test_noise_is_what_halves_of_a_run_differ_by():
    def noise(*rows):
        found = compare.noises({(str(i), "ring"): np.array(x, dtype=float) for i, x in enumerate(rows)})
        return [found[str(i), "ring"] for i in range(len(rows))]

    # [0, 0, d, d]: the halves differ by d, the interval is as wide, so q = 2 widths of d / 2.
    assert noise([0, 0, 3, 3]) == pytest.approx([3])
    assert noise([0, 0, 1, 1], [0, 0, 3, 3], [9, 9, 2, 2]) == pytest.approx([3, 3, 7])  # the median interval at least
    assert noise([0, 0, 0, 0], [0, 0, 3, 3], [2, 2, 5, 5])[0] >= 2.5  # no noise by chance; q is 95 % between 0, 2 and 2
    assert noise([0, 3, 0, 3], [0, 3, 0, 3], [0, 3, 0, 3]) == pytest.approx([0, 0, 0])  # halves alike
    assert noise([0, 0, 3, 3], [0, 9, 0]) == pytest.approx([3, 4.5])  # each with rows of as many repetitions
    assert noise([1], [1, 2]) == [math.inf, math.inf]
    assert noise([0, 0, 9, 3, 3, 3]) == pytest.approx([3])  # medians of the halves
    one, ring = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 8.0, 4.0, 16.0, 15.0]  # x = 1/2, 1/4, 3/4, 1/4, 1/3
    rows = [{"ring": ring, "one process": one}], [{"ring": [2.0 * second for second in ring], "one process": one}]
    (row,) = report("generation", *map(results, rows))[0]
    assert (row.what, row.method) == ("P=2, S=1024", "ring")
    assert (row.committed, row.fresh) == pytest.approx((1 / 3, 1 / 6))  # of medians it would be 3 / 8
    rows = [{"ring": [1.0, 1.0, 2.0, 2.0], "one process": [1.0] * 4}]
    (row,) = report("generation", results(rows), results(rows))[0]
    assert row.noise == pytest.approx(1.0)  # 100 %: the halves differ by a factor of 2
    # Of 9 the interval leaves the smallest and the largest out: it is as wide as the halves differ, so q = 2 widths.
    assert noise([0] * 4 + [2] * 5, [0, 0, 0, 99] + [6] * 5, [0] * 4 + [10] * 5) == pytest.approx([6, 6, 10])


@pytest.mark.parametrize(
    ("committed", "fresh", "said"),
    [
        (ON, ON, "the same machine: the references took 3.00 of their committed seconds"),
        (ON, {**ON, "cores": 8}, "another machine, or it is not known (cores 2 -> 8): ratios may have moved with it"),
        ({**ON, "cpu": "older"}, ON, "(cpu older -> one of 2026)"),
        ({**ON, "cpu": ""}, {**ON, "cpu": ""}, "(no cpu recorded)"),
    ],
)
def test_seconds_are_compared_on_the_same_machine_only(committed, fresh, said):
    before = timed(0)
    after = [{name: [3 * second for second in each] for name, each in row.items()} for row in before]
    for row in after:
        row["one process"][row["one process"].index(max(row["one process"]))] *= 100  # a hiccup
    rows, text = report("generation", results(before, committed), results(after, fresh))
    assert len(rows) == 24
    assert not any(row.moved for row in rows)
    assert said in text
    assert ("committed seconds" in text) == ("same machine" in said)


ROW = {"ring": THREE, "one process": THREE}
WRONG = {  # results, and what is said of them
    "sizes": (results([ROW], heads=4), "generation: other sizes (heads 8 -> 4); measure again"),
    "dtype": ({**results([ROW]), "dtype": "float64"}, "(dtype float32 -> float64)"),
    "no rows": ({"command": "python -m bench.generation"}, "results of another form (no 'rows')"),
    "no reference": (results([{"ring": THREE}]), "(no 'one process')"),
    "repetitions": (results([{**ROW, "ring": [1.0]}]), "P=2, S=1024, ring: 1 repetitions beside 3"),
    "none": (results([{"ring": [], "one process": []}]), "the seconds are []"),
    "endless": (results([{**ROW, "ring": [math.inf, 1.0, 1.0]}]), "the seconds are [inf, 1.0, 1.0]"),
    "twice": ({**results([ROW]), "rows": results([ROW])["rows"] * 2}, "P=2, S=1024, ring: 3 repetitions beside 3, or"),
}


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_compared_is_refused(name):
    wrong, said = WRONG[name]
    with pytest.raises(ValueError, match=r"^generation: ") as refused:
        report("generation", results([ROW]), wrong)
    assert said in str(refused.value)


@pytest.mark.parametrize("bench", [path.stem for path in sorted(record.FOLDER.glob("*.json"))])
def test_results_with_seconds_in_turn_can_be_compared(bench):
    """All but those of two rings that record themselves, and of three repetitions or fewer."""
    committed = record.load(bench)
    in_turn = any(isinstance(row.get("seconds"), dict) for row in committed.get("rows", ()))
    assert in_turn == ("reference" in committed)
    if in_turn:
        rows, _ = report(bench, committed, copy.deepcopy(committed))
        assert len(rows) == sum(len(row["seconds"]) - 1 for row in committed["rows"])
        assert not any(row.moved for row in rows)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_command(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "FOLDER", folder)
    path, copied = folder / "generation.json", tmp_path / "copy.json"

    def write(rows, **sizes):
        path.write_text(json.dumps(results(rows, **sizes)))

    def git(*words):
        name = "-c", "user.name=a", "-c", "user.email=a@b.c"
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    def said(status, *argv):
        assert compare.main(list(argv)) == status
        return capsys.readouterr()

    write(timed(0))
    assert "'HEAD' is no file and no commit; expected --with FILE_OR_COMMIT" in said(2).err  # no checkout yet
    git("init")
    git("add", ".")
    git("commit", "-m", "measured", "--no-gpg-sign")
    assert said(0).out == "0 of 0 moved by more than the noise\n"  # not measured again
    write(slower(timed(0), 7, "ring", 1.3))
    path.with_stem("generation.unfinished").write_text("{}")
    path.with_stem("five_ways").write_text("{}")  # not committed
    *others, last = said(0).out.splitlines()
    assert others[2].split()[0] == "down"
    assert others[2].endswith("P=2, S=8192: ring")
    assert last == "1 of 24 moved by more than the noise"
    path.with_stem("five_ways").unlink()
    copied.write_text(json.dumps(results(slower(timed(0), 7, "ring", 1.7))))
    assert " up " in said(0, "--with", str(copied)).out
    write(timed(0), heads=4)
    assert "other sizes (heads 8 -> 4)" in said(2).err
    assert "no file and no commit" in said(2, "--with=--all").err
    copied.write_text("no JSON")
    assert f"{copied} is no results file" in said(2, "--with", str(copied)).err
    copied.write_text(json.dumps({**results([]), "command": "python -m bench.memory"}))
    assert "memory has no results here; measure them: python -m bench.memory" in said(2, "--with", str(copied)).err
    path.with_stem("memory").write_text("{}")
    assert "memory keeps no repetitions of methods in turn" in said(2, "--with", str(copied)).err

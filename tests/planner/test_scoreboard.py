"""The scoreboard: its goals, its rows, its intervals of rows that were left out; and wrong predictions are seen."""

import math
import textwrap
from functools import partial
from unittest import mock

import pytest

from bench import scoreboard
from bench.scoreboard import PUBLISHED, Grade, fitted, grades, interval, intervals, left_out, questions, summary, times
from ring_planner.memory import RESERVE
from ring_planner.plan import ERRORS, HELD
from ring_planner.round_costs import FRAMEWORK
from tests.commands import check_shown

MARKED = grades()


def test_the_goals_are_met():
    errors = summary([each.error for each in times(MARKED)])
    assert errors["median"] <= 0.05
    assert errors["nine in ten"] <= 0.15
    peaks = [each.measured / each.predicted - 1 for each in MARKED if each.what == "peak_gib"]
    assert round(max(peaks), 3) == RESERVE == 0.073  # what ring-plan keeps free
    assert min(peaks) >= -0.05
    answers = questions(MARKED)
    assert len(answers) >= 70
    assert sum(right for *_, right in answers) >= 0.9 * len(answers)


def test_rows_that_no_constant_was_fitted_on_are_as_good():
    publishers = [{each.publisher for each in grades(each)} for each in scoreboard.SETS]
    assert len(publishers[0] | publishers[1]) == 2 * len(publishers[0]) == 10  # half of them, and none on both sides
    errors = summary([each.error for each in times(grades("graded"))])
    assert errors["median"] <= 0.06
    assert errors["nine in ten"] <= 0.18


def test_intervals_hold_for_rows_that_were_left_out_of_every_fit():
    known = [(ratio, of) for _, ratio, of in left_out(times(MARKED)) if of]
    assert len(known) >= 80
    held = sum(of["low"] <= ratio <= of["high"] for ratio, of in known)
    assert held >= 0.85 * len(known)
    told = f"tested on {len(known)} published times, their publisher left out: {held} ({held / len(known):.0%})"
    assert f"{told} fell into such an interval" == HELD


def test_a_publisher_is_judged_by_the_rows_of_all_others():
    """By a factor that is fitted on them, on which their ratios depend too."""
    ratio, own = partial(Grade.ratio, framework=dict.fromkeys(FRAMEWORK, 2.0)), {}
    with mock.patch.object(scoreboard, "fitted", return_value=ratio.keywords["framework"]) as fit:
        found = left_out(times(MARKED))
    for row in found:
        own.setdefault(row[0].publisher, []).append(row)
    for (publisher, rows), call in zip(own.items(), fit.call_args_list, strict=True):
        others = [each for each in times(MARKED) if each.publisher != publisher]
        assert (call.args, len(others) + len(rows)) == ((others,), len(times(MARKED)))
        assert rows == [(each, ratio(each), intervals(others, ratio).get(each.kind)) for each, *_ in rows]


def test_the_scoreboard_prints_what_it_shows_and_writes_what_the_planner_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scoreboard, "ERRORS", tmp_path / "errors.json")
    assert scoreboard.main() == 0
    assert (tmp_path / "errors.json").read_text() == ERRORS.read_text()
    shown = scoreboard.__doc__.partition("bench.scoreboard\n")[2].partition("\nSource")[0]
    check_shown(textwrap.dedent(shown), capsys.readouterr().out)


@pytest.mark.parametrize(
    ("middle", "most", "held", "status"),
    [(0.08, 0.25, 17, 0), (0.081, 0.25, 17, 1), (0.08, 0.251, 17, 1), (0.08, 0.25, 16, 1)],
)
def test_its_status_says_whether_it_is_good_enough(tmp_path, middle, most, held, status):
    """17 of 20 intervals are 85 %."""
    of_20 = [(MARKED[0], 1.0 if i < held else 1.2, {"low": 0.9, "high": 1.1}) for i in range(20)]
    few = {"grades": lambda apart=False: [] if apart else MARKED[:3], "left_out": lambda marked: of_20}
    few["summary"] = lambda errors: {"median": middle, "nine in ten": most, "worst": 1.0}
    with mock.patch.multiple(scoreboard, ERRORS=tmp_path / "errors.json", **few):
        assert scoreboard.main() == status


def test_the_constants_are_fitted_on_the_rows_that_they_name():
    assert fitted(times(grades("fitted"))) == FRAMEWORK
    alone = fitted([each for each in times(MARKED) if each.publisher == "NeMo"])
    assert alone[2026] == alone[2024] == FRAMEWORK[2024]  # no row is of that year: all count


def test_an_interval_by_hand():
    """Two rows: Student's t of one degree of freedom; a row alone has none; equal rows, 5 %."""
    half = 6.31 * math.sqrt(0.02) * math.sqrt(1.5)
    assert interval([1.0, math.exp(0.2)]) == pytest.approx((math.exp(0.1 - half), math.exp(0.1 + half)))
    assert [*scoreboard.T] == sorted(scoreboard.T, reverse=True)  # of more rows smaller
    assert interval([1.0, 1.0]) == (pytest.approx(1 / 1.05), pytest.approx(1.05))
    assert intervals(MARKED[:1], Grade.ratio) == {}
    errors = ([*summary([-i for i in range(1, n + 1)]).values()] for n in (1, 10, 11))
    assert [*errors] == [[1, 1, 1], [5.5, 9, 10], [6, 10, 11]]


def test_the_page_says_what_the_scoreboard_says():
    """bench/README.md; the site has the same numbers."""
    graded = [each.error for each in times(grades("graded"))]
    peaks = [each.error for each in MARKED if each.what == "peak_gib"]
    errors, of_graded, memory = map(summary, ([each.error for each in times(MARKED)], graded, peaks))
    asked = questions(MARKED)
    far = [(fast, slow) for fast, slow, _ in asked if slow.measured > 1.05 * fast.measured]
    contests = {(fast.name, slow.name, slow.row["source"]): fast.predicted < slow.predicted for fast, slow in far}
    layouts = sum(fast.row["way"] == slow.row["way"] for fast, slow in far)
    known = [of["low"] <= ratio <= of["high"] for _, ratio, of in left_out(times(MARKED)) if of]
    sources = len({each.row["source"] for each in times(MARKED)})

    def size(share):
        return f"{100 * share:.1f} %"

    def below(found):
        return f"below {size(found['median'])}, nine in ten below {size(found['nine in ten'])} |"

    rows = (
        f"{len(times(MARKED))} times from {sources} sources | half of the errors are {below(errors)}",
        f"the {len(graded)} of five publishers on whose times nothing was fitted | half {below(of_graded)}",
        f"without NVLink | {size(errors['worst'])} |",
        f"holds for {sum(known)} of {len(known)} times |",
        f"within {size(memory['worst'])} of the peak, which is {size(RESERVE)} of the count: so much",
        f"{len(asked)} pairs | right in {sum(right for *_, right in asked)}, or slower by less than 5 % |",
        f"| the {len(contests)} of these pairs that differ by more | right in {sum(contests.values())}; {layouts} of",
    )
    root = PUBLISHED.parents[1]
    inside = f"Tested on {len(known)} published times, their publisher left out: {sum(known)} (86%) fell into such"
    for name, *said in (
        ("bench/README.md", *rows),
        ("book/pages/planner.md", inside, f"{size(RESERVE)} of the memory"),
    ):
        words = " ".join((root / name).read_text().replace("\n# ", "\n").split())
        assert [each for each in said if each not in words] == [], name

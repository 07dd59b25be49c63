"""Examine the public rings that are installed, and write down what the doctor found: results.md.

    $ python -m ring_doctor.patients                     all of them: half an hour
    $ python -m ring_doctor.patients torch_loop          this one; the others' rows stay as they are

Before: ../assertion.py. After: findings/, the reports that can be filed.
Source: the packages of ring_doctor/patients/requirements.txt.
"""

import sys
from datetime import datetime, timezone
from pathlib import Path

from ring_doctor import examine
from ring_doctor.asking.answers import RIGHT, RIGHT_AS_CLAIMED, SAID, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.asking.patient import Patient, patient_of

TABLE = Path(__file__).parent / "results.md"
CANNOT = "cannot be examined"
SICK, LIMITED, HEALTHY = (SAID[level].lower() for level in (WRONG_RING, RIGHT_AS_CLAIMED, RIGHT))
ORDER = (SICK, CANNOT, LIMITED, HEALTHY)  # of the table's rows


def examined(patient: Patient) -> list[str]:
    """The cells between a patient's version and the date: the verdict, the mistake, and when it shows."""
    try:
        report = examine(patient)
    except CannotExamine as error:
        print(error)
        return [CANNOT, "", ""]
    verdict, found = SAID[report.level].lower() if report.healthy else SICK, report.diagnosis
    verdict += f", {len(report.examination.answers)} answers"
    verdict += "".join(f"; {limit}" for limit in report.limits) if report.healthy else f" ({report.level})"
    if not found:
        return [verdict, "", ""]
    mistake = " or ".join(f"`{explanation.name}`" for explanation in found.explanations) or "not known"
    return [verdict, mistake, found.when]


def rows_of(text: str) -> dict[str, str]:
    """The row of each patient in a table."""
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]  # below the head
    return {row[2:].partition(" | ")[0]: row for row in rows}


def table(rows: dict[str, str]) -> str:
    """results.md: the sick first."""

    def place(name: str) -> tuple[int, str]:
        verdict = rows[name].split(" | ")[2]
        return next(i for i, start in enumerate(ORDER) if verdict.startswith(start)), name

    lines = [
        "# What the doctor found in public rings\n",
        "Written by `python -m ring_doctor.patients`, on CPUs with gloo. Nothing is said about GPUs. "
        "[README.md](README.md) says what runs and what was replaced. The [findings](findings/README.md) say how large "
        "errors are.\n",
        "| patient | version | verdict | mistake | it shows | date |",
        "| --- | --- | --- | --- | --- | --- |",
        *(rows[name] for name in sorted(rows, key=place)),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The patients that are named, or all in results.md: a file, or "file:function", as its CLAIMS name it."""
    for name in sys.argv[1:] or rows_of(TABLE.read_text()):
        patient = patient_of(f"ring_doctor.patients.{name}")
        if not patient.version:  # its library is not installed
            print(f"{name}: left out; ring_doctor/patients/README.md says how to install it")
            continue
        cells = examined(patient)
        print(f"{name}: {' '.join(cells[:2])}", flush=True)
        row = " | ".join([name, patient.version, *cells, f"{datetime.now(timezone.utc):%Y-%m-%d}"])
        # read now: another run may have written meanwhile
        TABLE.write_text(table(rows_of(TABLE.read_text()) | {name: f"| {row} |"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Examine the public rings that are installed, and write down what the doctor found: results.json and results.md.

    $ python -m ring_doctor.patients                     all of them: half an hour
    $ python -m ring_doctor.patients torch_loop          this one; the others' lines stay as they are

Before: ../assertion.py. After: findings/, the reports that can be filed.
Source: the packages of ring_doctor/patients/requirements.txt.
"""

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ring_doctor import examine
from ring_doctor.asking.answers import FAILED, REFUSED, RIGHT, RIGHT_AS_CLAIMED, SAID, WRONG, WRONG_RING
from ring_doctor.asking.job import CannotExamine
from ring_doctor.asking.patient import Patient, patient_of
from ring_doctor.report import Report

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "results.json", HERE / "results.md"
CANNOT = "cannot be examined"
SICK, LIMITED, HEALTHY = (SAID[level].lower() for level in (WRONG_RING, RIGHT_AS_CLAIMED, RIGHT))
ORDER = (SICK, CANNOT, LIMITED, HEALTHY)  # of the table's rows


def examined(patient: Patient) -> dict[str, Any]:
    """What the doctor finds in it."""
    line = {"version": patient.version, "torch": torch.__version__, "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    try:
        report = examine(patient)
    except CannotExamine as error:
        return line | {"verdict": CANNOT, "remarks": [str(error)]}
    return line | of_report(report)


def of_report(report: Report) -> dict[str, Any]:
    """The verdict, the mistake, and how wrong the results are."""
    answers = report.examination.answers
    verdict = SAID[report.level].lower() if report.healthy else SICK
    found: dict[str, Any] = {"verdict": verdict, "level": report.level, "answers": len(answers)}
    found |= {"limits": report.limits} if report.limits else {}
    found |= {state: sum(answer.state == state for answer in answers) for state in (WRONG, FAILED, REFUSED)}
    if report.diagnosis:
        found |= {"mistake": [found.name for found in report.diagnosis.explanations], "when": report.diagnosis.when}
        found |= {"errors": errors(report)}
    says = {answer.says for answer in answers if answer.state in (FAILED, REFUSED)}
    return found | {"remarks": [*report.remarks, *sorted(says)]}


def errors(report: Report) -> dict[str, dict[str, float]]:
    """For each number of ranks the largest relative error (Frobenius norm) of the wrong results, of plain questions."""
    largest: dict[str, dict[str, float]] = {}
    for answer in report.diagnosis.answers if report.diagnosis else ():
        if answer.question.how == "plain" and answer.case.inputs == "normal":
            of_world = largest.setdefault(str(answer.case.world_size), {})
            for name in answer.wrong:
                of_world[name] = max(of_world.get(name, 0.0), float(f"{answer.relative[name]:.2g}"))
    return largest


def table(lines: dict[str, dict[str, Any]]) -> str:
    """results.md: the sick first."""
    rows = [
        "# What the doctor found in public rings\n",
        "Written by `python -m ring_doctor.patients`, on CPUs with gloo. Nothing is said about GPUs. "
        "[README.md](README.md) says what runs and what was replaced. Errors are relative, in the Frobenius norm, the "
        "largest of all plain questions, for each number of ranks.\n",
        "| patient | version | verdict | mistake | it shows | errors | date |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, line in sorted(lines.items(), key=lambda line: (ORDER.index(line[1]["verdict"]), line[0])):
        mistake = " or ".join(f"`{mistake}`" for mistake in line.get("mistake", [])) or "not known" * ("errors" in line)
        wrong = (
            f"{P}: " + ", ".join(f"{result} {error:.2g}" for result, error in of_world.items())
            for P, of_world in line.get("errors", {}).items()
        )
        verdict = f"{line['verdict']}, {line['answers']} answers" if "answers" in line else line["verdict"]
        limits = "".join(f"; {limit}" for limit in line.get("limits", []))
        verdict += f" ({line['level']})" if line["verdict"] == SICK else limits
        cells = name, line["version"], verdict, mistake, line.get("when", ""), "<br>".join(wrong)
        rows.append("| " + " | ".join([*cells, line["date"]]) + " |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """The patients that are named, or all in results.json: a file, or "file:function", as its CLAIMS name it."""
    for name in sys.argv[1:] or json.loads(RESULTS.read_text()):
        patient = patient_of(f"ring_doctor.patients.{name}")
        if not patient.version:  # its library is not installed
            print(f"{name}: left out; ring_doctor/patients/README.md says how to install it")
            continue
        line = examined(patient)
        print(f"{name}: {line['verdict']} {' or '.join(line.get('mistake', []))}", flush=True)
        lines = json.loads(RESULTS.read_text()) | {name: line}  # read now: another run may have written meanwhile
        RESULTS.write_text(json.dumps(dict(sorted(lines.items())), indent=1) + "\n")
        TABLE.write_text(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

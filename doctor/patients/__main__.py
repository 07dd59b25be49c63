"""Examine the public rings that are installed, and write down what the doctor found: results.json and results.md.

    $ python -m doctor.patients                     all of them: some ten minutes
    $ python -m doctor.patients diffusers yunchang  these; the others' lines stay as they are

Before: ../diagnosis.py and ../xray_picture.py. After: ../findings/, the reports that can be filed.
Source: the packages of requirements-patients.txt.
"""

import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import torch

from doctor import patients
from doctor.case import Case
from doctor.diagnosis import Diagnosis, diagnose
from doctor.examination import FAILED, REFUSED, WRONG, CannotExamine, Examination, Question, Room, examine
from doctor.patient import Patient, from_name
from doctor.xray import XRay, cases, xray_of
from doctor.xray_picture import thumbnail
from support import drawing

HERE = Path(__file__).parent
RESULTS, TABLE, XRAYS = HERE / "results.json", HERE / "results.md", HERE / "xrays"
NO_PATIENT = ("__main__", "flash_attn_by_hand")


def names() -> list[str]:
    """The patient files of this folder."""
    return [module.name for module in iter_modules(patients.__path__) if module.name not in NO_PATIENT]


def found(name: str) -> dict[str, Any]:
    """A patient's line of the table. Raises ModuleNotFoundError when its library is not installed."""
    patient = from_name(f"doctor.patients.{name}")
    start = time.monotonic()
    try:
        examination = examine(patient)
    except CannotExamine as error:
        return about(patient) | {"verdict": "cannot be examined", "says": str(error)}
    diagnosis = diagnose(examination)
    line = about(patient) | of_examination(examination, diagnosis)
    if diagnosis:
        XRAYS.mkdir(exist_ok=True)
        xray = xray_of_patient(patient, diagnosis)
        (XRAYS / f"{name}.svg").write_text(drawing.svg(thumbnail(xray)))
        line["xray"] = xray.text().splitlines()
    return line | {"seconds": round(time.monotonic() - start)}


def about(patient: Patient) -> dict[str, Any]:
    """What was examined, and when."""
    today = datetime.now(timezone.utc).date().isoformat()
    return {"about": patient.about, "version": patient.version, "torch": torch.__version__, "date": today}


def of_examination(examination: Examination, diagnosis: Diagnosis | None) -> dict[str, Any]:
    """The verdict, the names of the mistake, and the largest relative error of each result by number of ranks."""
    errors: dict[str, dict[str, float]] = {}
    for outcome in examination.outcomes:
        if outcome.question.how == "plain" and outcome.case.inputs == "normal":
            for result in outcome.wrong:
                of_world = errors.setdefault(str(outcome.case.world_size), {})
                of_world[result] = max(of_world.get(result, 0.0), float(f"{outcome.relative[result]:.2g}"))
    said = {state: [it for it in examination.outcomes if it.state == state] for state in (FAILED, REFUSED, WRONG)}
    return {
        "verdict": "healthy" if examination.healthy else "sick",
        "mistake": sorted(diagnosis.names) if diagnosis else [],
        "since": diagnosis.since if diagnosis else "",
        "questions": len(examination.outcomes),
        "wrong": len(said[WRONG]),
        "errors of wrong results": errors,
        "failed": [f"{it.question.words()}: {it.says}" for it in said[FAILED]],
        "refused": [f"{it.question.words()}: {it.says}" for it in said[REFUSED]],
        "remarks": examination.remarks,
    }


def xray_of_patient(patient: Patient, diagnosis: Diagnosis) -> XRay:
    """The X-ray of the wrong answer with the fewest ranks."""
    case = min((it.case for it in diagnosis.outcomes), key=lambda case: case.world_size)
    case = Case(case.world_size, 3 * case.world_size, case.causal, case.layout, dtype=case.dtype)
    room = Room(patient, case.world_size, 20.0, "cpu")
    try:
        runs = [room.ask(Question(run)).results for run in cases(case)]
    finally:
        room.close()
    return xray_of(*runs, case)


def table(lines: dict[str, dict[str, Any]]) -> str:
    """results.md."""
    rows = [
        "# What the doctor found in public rings\n",
        "Written by `python -m doctor.patients`, on CPUs with gloo. Nothing is said about GPUs. [README.md](README.md) "
        "says how to install them and what was replaced.\n",
        "| patient | version | verdict | mistake | it shows | largest relative error, by ranks | X-ray | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, line in lines.items():
        named = " or ".join(f"`{it}`" for it in line.get("mistake", []))
        mistake = named or ("no name fits" if line.get("wrong") else "")
        by_ranks = line.get("errors of wrong results", {})
        wrong = "<br>".join(
            f"{P}: " + ", ".join(f"{result} {error:.2g}" for result, error in of_world.items())
            for P, of_world in by_ranks.items()
        )
        picture = f"![X-ray of {name}](xrays/{name}.svg)" if "xray" in line else ""
        cells = name, line["version"], line["verdict"], mistake, line.get("since", ""), wrong, picture, line["date"]
        rows.append("| " + " | ".join(cells) + " |")
    rows += ["\nWhat was examined:\n", *(f"- {name}: {line['about']}" for name, line in lines.items())]
    return "\n".join(rows) + "\n"


def main() -> int:
    lines = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or names():
        try:
            lines[name] = found(name)
        except ValueError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            print(f"{name}: left out ({error.__cause__}); doctor/patients/README.md says how to install it")
            continue
        mistake = " or ".join(lines[name].get("mistake", []))
        print(f"{name}: {lines[name]['verdict']}{': ' * bool(mistake)}{mistake}", flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(lines.items())), indent=2) + "\n")
        TABLE.write_text(table(dict(sorted(lines.items()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

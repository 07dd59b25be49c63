"""What the examination of a whole model comes to: the verdict, the mistakes, where to look, and every number of ranks.

    text_of_model(report)        what a terminal shows; the first line is the verdict
    json_of_model(report)        the same for other programs, with the keys of an attention's report

Before: whole_model.py and report.py, an attention. After: html.py, the same as a page; __main__.py, the command.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ring_doctor.answers import RIGHT, RIGHT_AS_CLAIMED, SAID, WRONG_RING
from ring_doctor.mistakes import Mistake
from ring_doctor.mistakes_of_models import MISTAKES
from ring_doctor.report import explained, facts
from ring_doctor.whole_model import ModelExamination


@dataclass(frozen=True)
class ModelReport:
    """The name of a function, and all that was found out about it."""

    name: str
    examination: ModelExamination

    @property
    def healthy(self) -> bool:
        """Whether what the function takes is right."""
        return self.examination.healthy

    @property
    def level(self) -> str:
        """How bad: "right", "right for what it takes" or "wrong"."""
        return WRONG_RING if not self.healthy else RIGHT_AS_CLAIMED if self.examination.only else RIGHT

    @property
    def verdict(self) -> str:
        """One line: healthy, or sick and of what."""
        found, failed = self.examination, [world for world in self.examination.worlds if world.failure]
        if self.healthy:
            said = f"{SAID[self.level]}: {self.name}, loss and gradients are those of one process"
            return said + (f"; {found.only}" if found.only else "")
        if found.changes:
            return f"SICK: {self.name} changes its results from call to call"
        if found.diagnoses:
            return f"SICK: {' or '.join(' and '.join(each.names) for each in found.diagnoses)}, in {self.name}"
        if failed and all(world.right or world.failure for world in found.worlds):
            return f"SICK: {self.name} fails with {failed[0].world_size} ranks: {failed[0].failure}"
        shown = (
            found.clue.partition(": look at")[0].rstrip(".") or "wrong numbers that no mistake of the catalogue gives"
        )
        return f"SICK: {self.name}: {shown}"

    @property
    def mistakes(self) -> list[Mistake]:
        """The mistakes that the verdict names, each once."""
        names = dict.fromkeys(name for found in self.examination.diagnoses for name in found.names)
        return [MISTAKES[name] for name in names]

    @property
    def remarks(self) -> list[str]:
        """What else a reader must know about the verdict, in sentences."""
        found = self.examination
        said = [*found.notes, *(each.detail for each in found.diagnoses if each.detail)]
        if len(found.diagnoses) > 1:
            said.append("no number of ranks tells these explanations apart: they give equal numbers")
        return [f"{words[0].upper()}{words[1:]}." for words in said]

    @property
    def inference(self) -> list[str]:
        """Where to look, in a sentence, if no name explains the results."""
        return [self.examination.clue] if self.examination.clue else []


def text_of_model(report: ModelReport) -> str:
    """The report for a terminal."""
    lines = [report.verdict, *(f"  {words}" for words in [*report.inference, *report.remarks])]
    lines += [*explained(report.mistakes), ""]
    for world in report.examination.worlds:
        state = world.state if world.right else world.state.upper()
        lines.append(f"{state:<7}{world.asked}: {world.says(report.examination.allowed)}")
    return "\n".join(lines)


def json_of_model(report: ModelReport) -> dict[str, Any]:
    """The report as numbers, strings, lists and dicts. An infinite error is null."""
    found = report.examination
    return {
        "name": report.name,
        "torch": torch.__version__,
        "healthy": report.healthy,
        "level": report.level,
        "verdict": report.verdict,
        "mistakes": [list(each.names) for each in found.diagnoses],
        "facts": {mistake.name: facts(mistake) for mistake in report.mistakes},
        "remarks": report.remarks,
        "inference": report.inference,
        "answers": [
            {
                "question": world.asked,
                "ranks": world.world_size,
                "labels_hidden": world.hidden,
                "state": world.state,
                "says": world.failure,
                "found": world.says(found.allowed),
                "mistakes": [list(each.names) for each in world.found],
                "errors": {
                    "largest": world.error if math.isfinite(world.error) else None,
                    "allowed": found.allowed,
                },
            }
            for world in found.worlds
        ],
    }

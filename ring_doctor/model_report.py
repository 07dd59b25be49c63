"""What the examination of a whole model comes to: the verdict, the mistakes, where to look, and every number of ranks.

    text_of_model(found)        what a terminal shows; the first line is the verdict
    json_of_model(found)        the same for other programs, with the keys of an attention's report

Before: model_clues.py, and report.py, an attention. After: whole_model.py, which examines.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ring_doctor.answers import RIGHT, RIGHT_AS_CLAIMED, SAID, WRONG_RING
from ring_doctor.mistakes import Mistake
from ring_doctor.mistakes_of_models import MISTAKES
from ring_doctor.model_comparison import ModelDiagnosis, World
from ring_doctor.report import explained, facts


@dataclass(frozen=True)
class ModelExamination:
    """All that the doctor found out about a function."""

    name: str
    worlds: tuple[World, ...]
    diagnoses: tuple[ModelDiagnosis, ...]  # each of them explains every wrong world
    allowed: float
    notes: tuple[str, ...]
    only: str = ""  # what the function was asked for, if not for everything: "a label for every token"
    clue: str = ""  # where to look, if nothing explains the wrong worlds
    changes: bool = False  # from call to call

    @property
    def healthy(self) -> bool:
        """Whether what the function takes is right."""
        return all(world.right for world in self.worlds)

    @property
    def level(self) -> str:
        """How bad: "right", "right for what it takes" or "wrong"."""
        return WRONG_RING if not self.healthy else RIGHT_AS_CLAIMED if self.only else RIGHT

    @property
    def verdict(self) -> str:
        """One line: healthy, or sick and of what."""
        failed = [world for world in self.worlds if world.failure]
        if self.healthy:
            said = f"{SAID[self.level]}: {self.name}, loss and gradients are those of one process"
            return said + (f"; {self.only}" if self.only else "")
        if self.changes:
            return f"SICK: {self.name} changes its results from call to call"
        if self.diagnoses:
            return f"SICK: {' or '.join(' and '.join(each.names) for each in self.diagnoses)}, in {self.name}"
        if failed and all(world.right or world.failure for world in self.worlds):
            return f"SICK: {self.name} fails with {failed[0].world_size} ranks: {failed[0].failure}"
        shown = self.clue.partition(": look at")[0].rstrip(".")
        return f"SICK: {self.name}: {shown or 'wrong numbers that no mistake of the catalogue gives'}"

    @property
    def mistakes(self) -> list[Mistake]:
        """The mistakes that the verdict names, each once."""
        return [MISTAKES[name] for name in dict.fromkeys(name for found in self.diagnoses for name in found.names)]

    @property
    def remarks(self) -> list[str]:
        """What else a reader must know about the verdict, in sentences."""
        said = [*self.notes, *(each.detail for each in self.diagnoses if each.detail)]
        if len(self.diagnoses) > 1:
            said.append("no number of ranks tells these explanations apart: they give equal numbers")
        return [f"{words[0].upper()}{words[1:]}." for words in said]


def text_of_model(found: ModelExamination) -> str:
    """The report for a terminal."""
    lines = [found.verdict, *(f"  {words}" for words in [found.clue, *found.remarks] if words)]
    lines += [*explained(found.mistakes), ""]
    for world in found.worlds:
        state = world.state if world.right else world.state.upper()
        lines.append(f"{state:<7}{world.asked}: {world.says(found.allowed)}")
    return "\n".join(lines)


def json_of_model(found: ModelExamination) -> dict[str, Any]:
    """The report as numbers, strings, lists and dicts. An infinite error is null."""
    return {
        "name": found.name,
        "torch": torch.__version__,
        "healthy": found.healthy,
        "level": found.level,
        "verdict": found.verdict,
        "mistakes": [list(each.names) for each in found.diagnoses],
        "facts": {mistake.name: facts(mistake) for mistake in found.mistakes},
        "remarks": found.remarks,
        "inference": [found.clue] if found.clue else [],
        "answers": [
            {
                "question": world.asked,
                "ranks": world.world_size,
                "labels_hidden": world.hidden,
                "state": world.state,
                "says": world.failure,
                "found": world.says(found.allowed),
                "mistakes": [list(each.names) for each in world.found],
                "errors": {"largest": world.error if math.isfinite(world.error) else None, "allowed": found.allowed},
            }
            for world in found.worlds
        ],
    }

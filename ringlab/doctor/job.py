"""The processes that answer: a rank that hangs, crashes or raises is an answer too, and the next question follows.

Each number of ranks gets processes of its own, because libraries note the rank when they are imported.

Before: answers.py. After: examination.py, which asks.
Source: none.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from ringlab.doctor.answers import FAILED, REFUSED, Answer, judge
from ringlab.doctor.on_rank import ask_on_rank, prepare
from ringlab.doctor.patient import Patient
from ringlab.doctor.questions import Question
from ringlab.support.pool import LostRank, Raised, Ranks

START = 120.0  # seconds to import a library and to set it up
REFUSALS = ("ValueError", "NotImplementedError", "AssertionError")  # of all ranks: the patient refuses the question


class CannotExamine(Exception):
    """There is nothing to examine: the patient refuses or fails where every ring must answer."""


class Job:
    """Processes for one number of ranks, with the patient set up on each."""

    def __init__(self, patient: Patient, size: int, seconds: float, device: str) -> None:
        self.patient, self.size, self.seconds = patient, size, seconds
        self.ranks = Ranks(size, START, device)
        self.ready, self.lost = False, 0

    def ask(self, question: Question) -> Answer:
        """The answer to a question, whatever the ranks do. Raises CannotExamine when the set-up fails."""
        with TemporaryDirectory() as name:
            try:
                if not self.ready:
                    self.ranks.seconds = START
                    self.ranks(self.size, prepare, self.patient)
                    self.ready = True
                self.ranks.seconds = self.seconds
                of_ranks = self.ranks.outcomes(self.size, ask_on_rank, self.patient, question, Path(name), self.seconds)
            except RuntimeError as error:
                raise CannotExamine(f"its set-up fails: {str(error).splitlines()[-1]}") from error
            except LostRank as lost:
                self.ready, self.lost = False, self.lost + 1
                return Answer(question, FAILED, _why_lost(str(lost), Path(name)))
        members = question.members or tuple(range(self.size))
        of_members = [of_ranks[rank] for rank in members]
        raised = [result for result in of_members if isinstance(result, Raised)]
        if not raised:
            return judge(question, of_members)
        if any(each.kind != "ValueError" for each in raised):
            self.ready = False  # the ranks form another process group: set up again
        said = f"{raised[0].kind}: {raised[0].message.strip().splitlines()[0] if raised[0].message.strip() else ''}"
        if len(raised) < len(members):
            return Answer(question, FAILED, f"{len(raised)} of {len(members)} ranks raised {said}")
        refused = question.may_refuse or raised[0].kind in REFUSALS
        return Answer(question, REFUSED if refused else FAILED, said, raised=True)

    def close(self) -> None:
        self.ranks.stop()


def _why_lost(reason: str, folder: Path) -> str:
    """Which rank died or waits, and in which line of code, as far as the ranks could write it."""
    first = reason.splitlines()[0]
    if "raised:" in reason:
        return f"{first}; another rank raised {reason.strip().splitlines()[-1]}"
    waiting: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip().startswith("File")]
        theirs = [line for line in lines if not any(ours in line for ours in ("/torch/", "/doctor/", "/python3"))]
        theirs += [line for line in lines if "site-packages" in line and "/torch/" not in line]
        if theirs:
            waiting.setdefault(theirs[0].replace("File ", ""), []).append(path.name)
    return first + "".join(f"; {', '.join(ranks)} in {line}" for line, ranks in waiting.items())

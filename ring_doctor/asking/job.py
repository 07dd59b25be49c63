"""The processes that answer: a rank that hangs, crashes or raises is an answer too, and the next question follows.

    hang(folder, [0, 2])      ->    True: these ranks wait for messages, and waited in the same lines some seconds ago
    rest(folder, [0, 2])      ->    True: they have computed nothing for the time of a question, or are in a loop
    lines_of_ranks(folder)    ->    {("ring.py", 12, "attention"): [0, 2]}

Each number of ranks gets processes of its own, because libraries note the rank when they are imported.

Before: answers.py. After: examination.py, which asks.
"""

import linecache
import re
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ring_doctor.asking.answers import FAILED, LATE, REFUSED, WRONG, Answer, judge
from ring_doctor.asking.calls import OFTEN, WrongResult, ask_on_rank, own_place, prepare
from ring_doctor.asking.patient import Patient
from ring_doctor.asking.questions import Question, kind
from ring_doctor.asking.together import feature_of, without_one
from ringlab.support.expect import expect
from ringlab.support.processes import PRELOAD, Frame, LostRank, Raised, Ranks, own_frame

PRELOAD.append(ask_on_rank.__module__)  # once, not once a rank: half a second for each number of ranks
SECONDS = 10.0  # for one question; a right ring needs some milliseconds
START = 120.0  # seconds to import a library and to set it up
ENOUGH = round(1 / OFTEN) + 1  # looks at a rank in the time for a question
SPINS = 3 * ENOUGH  # looks at a rank that computes in Python: no attention of some tokens takes so long
DEADLOCK = "deadlock: all ranks wait in {}; let even ranks send first (chapter 4 of notebooks/)"
LONGER = 3  # times as long as the slowest answer so far a question may take: then the machine is slow, or compiles
REFUSALS = ("ValueError", "NotImplementedError", "AssertionError")  # of all ranks: the patient refuses the question
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', flags=re.MULTILINE)
STACK = re.compile(r"^(?:Stack|Fatal Python error)", flags=re.MULTILINE)
WAITING = re.compile(r"\.(wait|poll|get|multi_get|is_completed)\(")  # in the line in which a rank is
OTHER_SIZE = re.compile(r".*op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+).*")  # gloo's words

Tell = Callable[[str], None]  # it is told in words what is done


class CannotExamine(Exception):
    """There is nothing to examine: the patient refuses or fails where every ring must answer."""


class Job:
    """Processes for one number of ranks, with the patient set up on each."""

    def __init__(self, patient: Patient, size: int, seconds: float = SECONDS, device: str = "cpu") -> None:
        self.patient, self.size, self.seconds = patient, size, seconds
        self._errors = TemporaryDirectory()  # for what the ranks write to stderr: gloo's own words when it gives up
        self.ranks = Ranks(size, START, device, Path(self._errors.name))
        self.ready, self.slowest = False, 0.0  # seconds of an answer, after the set-up
        self.called: set[Hashable] = set()  # the kinds of questions that were answered
        self.keeps, self.length = False, 0  # whether a call spoils one of another length; the tokens of the last call

    def restart(self) -> None:
        """Let the next question have new processes."""
        self.ranks.stop()
        self.ready = False
        self.called.clear()

    def ask_with_fewer(self, question: Question | None) -> list[Answer]:
        """The answers to the question without one option each; and again, from the first that is still wrong."""
        found: list[Answer] = []
        while question:
            cases = without_one(self.patient, question.case)
            answers = [self.ask(replace(question, case=case, feature=feature_of(case))) for case in cases]
            found += [answer for answer in answers if answer.results]
            question = next((answer.question for answer in answers if answer.state == WRONG), None)
        return found

    def ask(self, question: Question) -> Answer:
        """The answer to a question, whatever the ranks do. Raises CannotExamine when the set-up fails.

        The first question of a kind may take as long as the set-up: compilers work then. The time for the others grows
        with what an answer took. When it is over and no rank hangs, the answer is LATE: the machine may be too slow.
        """
        try:
            at = torch.cat([question.case.positions(rank) for rank in range(question.case.world_size)])
            given, S = f"{question.case.layout} deals out {len(at.unique())} of", question.case.seq_len
            expect(len(at) == len(at.unique()) == S, f"{given} {S} tokens, {len(at)} in all", "each token once")
        except Exception as error:  # a layout of the user may not take every length
            return Answer(question, REFUSED, f"{type(error).__name__}: {error}", raised=True)
        if self.keeps and question.case.seq_len != self.length:
            self.restart()
        self.length = question.case.seq_len
        with TemporaryDirectory() as name:
            folder, members = Path(name), question.members or tuple(range(self.size))
            try:
                if not self.ready:
                    self.ranks.seconds, self.ranks.hang = START, lambda silent: False
                    self.ranks(self.size, prepare, self.patient)
                    self.ready = True
                least = self.seconds if kind(question) in self.called else max(START, self.seconds)
                self.ranks.seconds = max(least, LONGER * self.slowest)
                self.ranks.hang = lambda silent: hang(folder, silent) or rest(folder, silent)
                start = time.monotonic()
                of_ranks = self.ranks.outcomes(self.size, ask_on_rank, self.patient, question, folder, self.seconds)
                self.slowest = max(self.slowest, time.monotonic() - start)
            except RuntimeError as error:
                raise CannotExamine(f"its set-up fails: {str(error).splitlines()[-1]}") from error
            except LostRank as lost:
                self.restart()
                waits = bool(lost.silent) and all(each.lost_connection for each in lost.raised.values())
                late = lost.silent and not lost.raised and not hang(folder, lost.silent)
                lines, state = lines_of_ranks(folder), LATE if late else FAILED
                says, silent = why_lost(lost, folder, members, Path(self._errors.name)), tuple(lost.silent)
                return Answer(question, state, says, lost=True, hangs=waits, silent=silent, waits=lines)
        self.called.add(kind(question))
        raised = {rank: of_ranks[rank] for rank in members if isinstance(of_ranks[rank], Raised)}
        if not raised:
            return judge(question, [of_ranks[rank] for rank in members])
        if any(each.kind not in REFUSALS[:2] for each in raised.values()):
            self.restart()  # messages may be under way, and default arguments hold the old group
        causes = {rank: each for rank, each in raised.items() if not each.lost_connection} or raised
        [cause, *_] = causes.values()
        where = {"kind": cause.kind, "where": cause.where}
        if len(causes) < len(members):  # a ring never refuses on some ranks only
            return Answer(question, FAILED, told(causes), **where)
        state, says = (REFUSED, _said(cause)) if cause.kind in REFUSALS else (FAILED, _said(cause, place=True))
        return Answer(question, state, says, raised=True, returned=cause.kind == WrongResult.__name__, **where)

    def close(self) -> None:
        self.ranks.stop()
        self._errors.cleanup()


def why_lost(lost: LostRank, folder: Path, members: Sequence[int], errors: Path) -> str:
    """Which rank died or waits, in which line of code, as far as the ranks could write it, and which returned.

    `folder` has the ranks' stacks, and `errors` what they wrote to stderr.
    """
    if causes := {rank: each for rank, each in lost.raised.items() if not each.lost_connection}:
        return f"{told(causes)}; {lost.reason}"
    at = {stacks[-1][0][2] for stacks in _read(folder).values() if stacks and stacks[-1]}  # functions of torch
    dead = at in ({"send"}, {"recv"}) and hang(folder, members) and [*members] == [*lost.silent]
    words = "" if lost.silent else _last_words(errors)
    said = [DEADLOCK.format(*at) if dead else lost.reason, words]
    said += [f"{ranks_in_words(ranks)} in {line}" for line, ranks in lines_of_ranks(folder, own_place).items()]
    returned = [rank for rank in members if rank not in (*lost.silent, *lost.raised)]
    if lost.silent and returned:
        said.append(ranks_in_words(returned, "has returned", "have returned"))
    return "; ".join(filter(None, said))


def _last_words(errors: Path) -> str:
    """What a C++ library wrote when it ended its process."""
    texts = (path.read_text(errors="replace") for path in sorted(errors.glob("stderr*")))
    lines = (line.partition("what():")[2].strip() for text in texts for line in text.splitlines())
    return OTHER_SIZE.sub(r"a message of \1 bytes came for a buffer of \2", next(filter(None, lines), ""))


def told(raised: dict[int, Raised]) -> str:
    """Which ranks raised, and what the first of them says."""
    [first, *_] = raised.values()
    return f"{ranks_in_words(list(raised))} raised {_said(first, place=True)}"


def ranks_in_words(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    """ "rank 1", or "ranks 1, 2"; then `one` or `several`, the forms of a verb: "rank 1 waits"."""
    noun, verb = ("ranks", several) if len(ranks) > 1 else ("rank", one)
    return f"{noun} {', '.join(map(str, ranks))} {verb}".rstrip()


def _said(raised: Raised, *, place: bool = False) -> str:
    said = f"{raised.kind}: {raised.message.strip().partition(chr(10))[0]}"
    return said + (f" ({raised.where})" if place and raised.where else "")


# What the ranks wrote -------------------------------------------------------------------------------------------------


def lines_of_ranks(folder: Path, of: Callable[[Sequence[Frame]], Any] = own_frame) -> dict[Any, list[int]]:
    """The ranks that have written a stack, by the line of the user's code in which they are, or by `of` a stack."""
    found: dict[Any, list[int]] = {}
    for rank, stacks in sorted(_read(folder).items()):
        if stacks and (at := of(stacks[-1])):
            found.setdefault(at, []).append(rank)
    return found


def hang(folder: Path, silent: Sequence[int]) -> bool:
    """Whether each of these ranks waits for a message, in the line in which it waited the last time."""
    stacks = _read(folder)
    last = [stacks.get(rank, [])[-2:] for rank in silent]
    return all(len(two) == 2 and two[0] == two[1] and _waits(two[1]) for two in last)


def rest(folder: Path, silent: Sequence[int]) -> bool:
    """Whether each of these ranks waits, or is in lines of the user's own, for ENOUGH looks without computing anything.

    A compiler works in lines of a library, and a slow rank computes: it gets SPINS looks.
    """
    stacks, texts = _read(folder), _texts(folder)
    still = all(len(of := texts.get(rank, [])[-ENOUGH:]) == ENOUGH and len({*of}) == 1 for rank in silent)
    last = [stacks.get(rank, [])[-(ENOUGH if still else SPINS) :] for rank in silent]
    enough = still or all(len(of) == SPINS for of in last)
    return enough and all(_waits(at) or at[:1] == [own_frame(at)] for of in last for at in of)


def _waits(frames: Sequence[Frame]) -> bool:
    """Whether the innermost calls wait for a message, or for what another rank writes into a store."""
    in_torch = any("/torch/distributed/" in path for path, _, _ in frames[:3])
    return in_torch or bool(frames and WAITING.search(linecache.getline(*frames[0][:2])))


def _texts(folder: Path) -> dict[int, list[str]]:
    """By rank the stacks that it wrote, each with the seconds that it had computed."""
    return {int(path.name): STACK.split(path.read_text())[1:] for path in folder.glob("[0-9]*")}


def _read(folder: Path) -> dict[int, list[list[Frame]]]:
    """By rank the stacks, the innermost frame first."""
    return {r: [[(f, int(n), of) for f, n, of in FRAME.findall(each)] for each in x] for r, x in _texts(folder).items()}

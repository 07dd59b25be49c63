"""How long does a chapter take? Counted from what its page shows, by the rule of CONTRIBUTING.md.

python -m tests.pages.reading_time    prints what was counted of each chapter, beside the minutes that it states
"""

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

# What a reader takes in in a minute. The text is dense, and for many readers it is in a second language.
WORDS, CODE, OUTPUT, PICTURES = 120, 12, 40, 1
EXERCISE = (5, 10)  # minutes for an exercise: at least, at most
LONGEST = 30  # minutes for a chapter of the road with its exercises, and for the reading of any other

PRINTS_SOURCE = re.compile(r"\b(print_source|getsource)\(")
FOR_LATER = "For later"  # an exercise that says so does not count
STATED = re.compile(r"(\d+) minutes to read, (\d+) for the exercises")


@dataclass
class Counted:
    """What a page shows before its exercises, and how many exercises count."""

    words: int = 0
    code: int = 0
    output: int = 0
    pictures: int = 0
    exercises: int = 0

    @property
    def minutes(self) -> float:
        return self.words / WORDS + self.code / CODE + self.output / OUTPUT + self.pictures / PICTURES


def lines_of_code(source: str) -> int:
    """Lines that are not empty, and import nothing."""
    return sum(not re.match(r"\s*$|import |from ", line) for line in source.splitlines())


def printed(cell: NotebookNode) -> str:
    """What a cell printed or returned as text."""
    outputs = [output for output in cell.get("outputs", ()) if "image/png" not in output.get("data", {})]
    return "".join(output.get("text") or output["data"]["text/plain"] for output in outputs)


def pictures(cell: NotebookNode) -> int:
    """How many pictures a cell shows."""
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", ())) + cell.source.count("![")


def count(notebook: NotebookNode) -> Counted:
    """What the chapter shows, up to "## Your turn"."""
    seen, turn = Counted(), False
    for cell in notebook.cells:
        if turn:
            seen.exercises += "print(check_" in cell.source and FOR_LATER not in cell.source
            continue
        text, heading, _ = cell.source.partition("## Your turn")
        turn = bool(heading)
        if cell.cell_type == "code":
            seen.code += lines_of_code(text)
            lines = len(printed(cell).splitlines())
            seen.code += lines if PRINTS_SOURCE.search(text) else 0
            seen.output += 0 if PRINTS_SOURCE.search(text) else lines
        else:
            seen.code += sum(lines_of_code(block) for block in re.findall(r"```.*?\n(.*?)```", text, re.S))
            prose = re.sub(r"```.*?```|\]\([^)]*\)|<[^>]*>", " ", text, flags=re.S)
            seen.words += len(prose.split())
        seen.pictures += pictures(cell)
    return seen


def stated(source: Path) -> tuple[int, int]:
    """The minutes that a chapter states: to read, and for its exercises."""
    read, more = STATED.search(source.read_text()).groups()
    return int(read), int(more)


def main() -> None:
    from notebooks.source import build  # it starts a kernel's libraries, which the counting does not need

    for source in build.chapters():
        seen = count(nbformat.read(build.pair(source), as_version=4))
        print(f"{source.stem:<32}{seen.minutes:5.1f} counted, {stated(source)} stated  {seen}")


if __name__ == "__main__":
    main()

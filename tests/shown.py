"""Is what a document shows still what its command prints? Equal text, but for what differs between two right runs."""

import re

# A time ("0.123 s"), an error ("3.1e-07"), the machine: they are measured anew each time.
_MEASURED = [
    (r"\d+\.\d+ (s|ms)\b", r"<time> \1"),
    (r"\b\d(\.\d+)?e-\d+\b", "<error>"),
    (r"\b0(\.0+)?e\+00\b", "<error>"),
    (r"-?\d+% of the messages' time", "<share> of the messages' time"),
    (r"(?m)^machine .*$", "<machine>"),
    (r"\b\d+ GPU\(s\)", "<n> GPU(s)"),
]


def masked(text: str) -> list[str]:
    """The lines of the text without what is measured, and without white space at the end of lines and of the text."""
    for pattern, replacement in _MEASURED:
        text = re.sub(pattern, replacement, text)
    return [line.rstrip() for line in text.strip().splitlines()]


def check_shown(shown: str, printed: str) -> None:
    """Assert that `shown` is `printed`, where a line `...` of `shown` stands for any number of lines."""
    lines, rest, skipping = masked(shown), masked(printed), False
    for line in lines:
        if line.strip() == "...":
            skipping = True
            continue
        if skipping:
            assert line in rest, f"shown, but not printed (any more):\n{line}"
            rest = rest[rest.index(line) :]
        assert rest, f"shown, but not printed (any more):\n{line}"
        assert line == rest[0], f"shown:   {line}\nprinted: {rest[0]}"
        rest, skipping = rest[1:], False
    assert skipping or not rest, f"printed, but not shown:\n{rest[0]}"

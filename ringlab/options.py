"""The options of every command. What is wrong with them is said in one line. This file needs no torch."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Its errors are one line, without the usage. Of the ranks that torchrun starts, the first of each host speaks."""

    def speaks(self) -> bool:
        return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"  # a folder may lack on one host alone

    def format_help(self) -> str:
        return super().format_help() if self.speaks() else ""

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line, which says what is expected."""
        line = " ".join(message.split())
        expected = "" if "expected" in line else "; expected options as in --help"
        if self.speaks():
            print(f"{self.prog}: {line}{expected}", file=sys.stderr)
        raise SystemExit(2)


def positive(text: str) -> int:
    """A type for options: a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a whole number of 1 or more")
    return int(text)


def new_file(suffix: str) -> Callable[[str], Path]:
    """A type for options: the name of a file to write. To write into a pipe would wait for a reader."""

    def path(text: str) -> Path:
        place = Path(text).resolve()
        if not text.endswith(suffix) or (place.exists() and not place.is_file()) or not place.parent.is_dir():
            expected = f"a name ending in {suffix} of a file, in a folder that exists"
            raise argparse.ArgumentTypeError(f"{text!r} given, expected {expected}")
        return Path(text)

    return path

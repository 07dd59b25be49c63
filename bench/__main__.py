"""Measure, keep the results in bench/results, and write them into the pages. Without names: everything, in an hour.

$ python -m bench [NAME ...]
"""

import subprocess
import sys

from bench import pages, record
from bench.record import BENCHES
from ringlab.options import Parser


def measure(name: str) -> None:
    try:
        results = BENCHES[name].run()
    except OSError as reason:
        print(f"{name}: nothing measured: {reason}")
        return
    print(f"# {name}", record.heading(results), *BENCHES[name].tables(results), sep="\n\n")
    record.save(name, results)
    pages.write()


def main() -> int:
    parser = Parser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(BENCHES)} (all)")
    names = parser.parse_args().names or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        parser.error(f"{' and '.join(unknown)} is no bench; expected one of {', '.join(BENCHES)}")
    if len(names) == 1:
        measure(names[0])
        return 0
    commands = ([sys.executable, "-m", "bench", name] for name in names)  # some limit their process
    return max(subprocess.run(command).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())

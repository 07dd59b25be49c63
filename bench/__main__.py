"""Measure, keep the results in bench/results, and write them into the pages. Without names: everything, in 90 minutes.

$ python -m bench [NAME ...] [--quick]
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from bench import pages, record
from bench.record import BENCHES
from ringlab.options import Parser


def measure(name: str, quick: bool) -> None:
    bench, elsewhere = BENCHES[name], TemporaryDirectory()
    try:
        with elsewhere, mock.patch.object(record, "FOLDER", Path(elsewhere.name) if quick else record.FOLDER):
            results = bench.run(**bench.quick if quick else {})
    except OSError as reason:
        print(f"{name}: nothing measured: {reason}")
        return
    print(f"# {name}", record.heading(results), *bench.tables(results), sep="\n\n")
    if not quick:
        record.save(name, results)
        pages.write()


def main() -> int:
    quick = [name for name, bench in BENCHES.items() if bench.quick]
    parser = Parser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(BENCHES)} (all)")
    parser.add_argument("--quick", action="store_true", help=f"a minute, and nothing is kept: {', '.join(quick)}")
    options = parser.parse_args()
    names, known = options.names or list(BENCHES), quick if options.quick else BENCHES
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{' and '.join(unknown)} cannot be measured so; expected one of {', '.join(known)}")
    if len(names) == 1:
        measure(names[0], options.quick)
        return 0
    flags = ["--quick"] if options.quick else []
    commands = ([sys.executable, "-m", "bench", name, *flags] for name in names)  # some limit their process
    return max(subprocess.run(command).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())

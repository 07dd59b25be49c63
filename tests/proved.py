"""Did the exhaustive tests of the doctor pass on these very sources? `make doctor` notes it, and .ci/run asks.

python -m tests.proved            exit 0: they did; exit 1: the doctor or a ring has changed since
python -m tests.proved --write    note it
"""

import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTE = ROOT / "tests" / "proved.txt"
SOURCES = ["ring_attn.py", *(f"ringlab/{part}/*.py" for part in ("doctor", "training", "basics", "support"))]
SOURCES += [f"tests/{names}.py" for names in ("sick/*", "sick_*", "wrong_*", "test_doctor_*", "test_sick_rings")]


def digest() -> str:
    """Of the sources of the doctor, of the rings, and of the tests that compare them."""
    found = sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def main(argv: list[str]) -> int:
    if argv == ["--write"]:
        NOTE.write_text(digest() + "\n")
        return 0
    proved = NOTE.exists() and NOTE.read_text().strip() == digest()
    print("the doctor's exhaustive tests passed on these sources" if proved else "the doctor or a ring has changed")
    return 0 if proved else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

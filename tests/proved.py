"""Whether every sick ring was examined by the doctor as it is now: `make doctor` takes long, so CI runs it only if not.

    $ python -m tests.proved            exit status 0: `make doctor` was green with these files
                                        else 1: it prints which part of those tests is to run
    $ python -m tests.proved --record   after `make doctor`: keep the digest of these files

Which of the PARTS follows from the files: each change examines another part, of half a minute or so.
"""

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = 60
RECORD = ROOT / "tests" / "proved.sha256"
PATTERNS = ("ring_attn.py", "ring_doctor/**/*.py", "ringlab/training/*.py", "ringlab/support/*.py")
PATTERNS += ("tests/sick*/*.py", "tests/sick*.py", "tests/examined.py", "tests/doctor/*.py")


def digest() -> str:
    """The SHA-256 of the doctor, the rings and their tests, in hexadecimal digits."""
    files = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def main() -> int:
    if sys.argv[1:] == ["--record"]:
        RECORD.write_text(digest() + "\n")
    elif not RECORD.exists() or RECORD.read_text().strip() != digest():
        print(int(digest(), 16) % PARTS)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A folder whose files have checksums: any bit that flips, in any file, is noticed; the list itself is one of them."""

import subprocess
from pathlib import Path

import pytest

from ringlab.support.run_folder import SUMS, as_text, changed, sha256

NEEDED = {"first", "second"}


@pytest.fixture
def folder(tmp_path):
    for name in ("first", "second", "third"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    (tmp_path / SUMS).write_text(as_text({path.name: sha256(path) for path in tmp_path.iterdir()}))
    return tmp_path


def test_any_flipped_bit_is_found_and_by_one_rank_at_least(folder):
    assert changed(folder, NEEDED, 0, 1) is None
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for bit in range(8 * len(whole)):
            path.write_bytes((int.from_bytes(whole, "big") ^ 1 << bit).to_bytes(len(whole), "big"))
            found = changed(folder, NEEDED, 0, 1)
            assert found, (path, bit)
            assert found.startswith(str(folder))
            if bit % 10 == 0:
                assert found in [changed(folder, NEEDED, rank, 3) for rank in range(3)]
        path.write_bytes(whole)
    assert [changed(folder, NEEDED, rank, 5) for rank in range(5)] == [None] * 5


def test_the_list_is_that_of_the_command_sha256sum(folder):
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["first: OK", "second: OK", "third: OK"]


@pytest.mark.parametrize("name", ["first", SUMS])
def test_what_is_no_file_is_named(folder, name):
    (folder / name).unlink()
    assert changed(folder, NEEDED, 0, 1) == f"{folder / name} cannot be read: there is no such file"
    Path(folder / name).mkdir()
    assert changed(folder, NEEDED, 0, 1) == f"{folder / name} cannot be read: there is no such file"

"""What tests of bad input share: the words of a message, other hosts.

A test asks for some words of what a user is told. That none of the others goes wrong, said.txt sees.
"""

import os
import re
from pathlib import Path
from unittest import mock

from ringlab.support import agreement
from ringlab.support.expect import attempt
from ringlab.support.pipes import inbox_of_job
from tests.commands import masked

SAID = Path(__file__).with_name("said.txt")  # what is told is added to it where RECORD is set: read the diff
OTHERS = [  # what differs from run to run, or is told by others
    (r"0x[0-9a-f]+|-?\d{8,}|(?<=of call )\d+", "<number>"),
    (r"/\S*pytest-\S*?(?=[,;:]?(\s|$))", "<path>"),
    (r"(\w+Error): .*", r"\1: ..."),
]


def assert_recorded(text):
    """Each word and number of what a user is told is as it was when somebody read it."""
    for pattern, replacement in OTHERS:
        text = re.sub(pattern, replacement, text)
    told, said = "\n".join(masked(text)), SAID.read_text()
    if "RECORD" in os.environ and f"\n\n{told}\n\n" not in said:
        SAID.write_text(f"{said}{told}\n\n")
    assert f"\n\n{told}\n\n" in SAID.read_text(), f"not in {SAID.name}, which RECORD=1 adds to: {told}"


def all_of(words):
    """A pattern for texts that have all these words, in order."""
    return "(?s)" + ".*".join(re.escape(word) for word in words)


def said(context, work, *args):
    """What `work` refuses on this rank. Not in mid pass: that would end the group, which a right call may want next."""
    with mock.patch.object(agreement, "_ended") as ended:
        words = attempt(work, context, *args)
    assert not ended.update.called, f"refused in mid pass: {words}"
    return words


def assert_refused(ranks, world_size, words, work, *args):
    """Every rank raises one ValueError that has these words, in order: one text, or several. Returns it."""
    first, *others = ranks(world_size, said, work, *args)
    assert re.search(all_of([words] if isinstance(words, str) else words), str(first)), first
    assert others == [first] * (world_size - 1)
    assert_recorded(str(first))
    return first


def as_on_hosts(hosts):
    """As if each rank of the job were on the host of this name; () is one that has no pipes."""
    names = [host if isinstance(host, tuple) else (host,) for host in hosts]
    return mock.patch.object(inbox_of_job(), "hosts", dict(enumerate(names)))

"""What tests of bad input share: the words of a message, other hosts."""

import re
from unittest import mock

from ringlab.support import agreement
from ringlab.support.expect import attempt
from ringlab.support.pipes import inbox_of_job


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
    return first


def as_on_hosts(hosts):
    """As if each rank of the job were on the host of this name; () is one that has no pipes."""
    names = [host if isinstance(host, tuple) else (host,) for host in hosts]
    return mock.patch.object(inbox_of_job(), "hosts", dict(enumerate(names)))

"""What the tests of bad input share: the words of a message, that all ranks refuse with the same one, other hosts."""

import re
from unittest import mock

from ringlab.support.pipes import inbox_of_job


def all_of(words):
    """A pattern for texts that have all these words, in order."""
    return "(?s)" + ".*".join(re.escape(word) for word in words)


def refusal(outcomes):
    """The message of the ValueError that every rank raised, the same one on all."""
    assert [outcome.kind for outcome in outcomes] == ["ValueError"] * len(outcomes), outcomes
    assert len({outcome.message for outcome in outcomes}) == 1
    return outcomes[0].message


def as_on_hosts(hosts):
    """As if each rank of the job were on the host of this name; () is one that has no pipes."""
    names = [host if isinstance(host, tuple) else (host,) for host in hosts]
    return mock.patch.object(inbox_of_job(), "hosts", {rank: (name, "") for rank, name in enumerate(names)})

"""What the tests of bad input share: the words of a message, and that all ranks refuse with the same one."""

import re


def all_of(words):
    """A pattern for texts that have all these words, in order."""
    return "(?s)" + ".*".join(re.escape(word) for word in words)


def refusal(outcomes):
    """The message of the ValueError that every rank raised, the same one on all."""
    assert [outcome.kind for outcome in outcomes] == ["ValueError"] * len(outcomes), outcomes
    assert len({outcome.message for outcome in outcomes}) == 1
    return outcomes[0].message

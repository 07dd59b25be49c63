"""Mistakes by name. Each one is planted for a while: on each rank, with MISTAKES["stale_block"](): ..."""

from unittest import mock


def patch(module, name, mistake):
    """A function that puts `mistake` in the place of a piece of the right code; of a class, a new object each time."""
    return lambda: mock.patch.object(module, name, mistake() if isinstance(mistake, type) else mistake)


class Mistakes(dict):
    """By its name, the function that plants a mistake."""

    def replaces(self, module, name):
        """Note the function or class below, which takes the place of `name` in this module."""

        def note(mistake):
            self[mistake.__name__] = patch(module, name, mistake)
            return mistake

        return note


class OwnQueriesOnly:
    """A backward pass of blocks in which each rank keeps what its queries add to one block, its first one."""

    def __init__(self, backward):
        self.backward, self.calls = backward, 0

    def __call__(self, *block, **options):
        self.calls += 1
        d_q, d_k, d_v = self.backward(*block, **options)
        return (d_q, d_k, d_v) if self.calls == 1 else (d_q, 0 * d_k, 0 * d_v)


def mistakes_of_blocks(module, name):
    """Mistakes of any backward pass of a block, whose results are dq, dk and dv: for `name` of this module."""
    backward = getattr(module, name)

    def then(change):
        return patch(module, name, lambda *block, **options: change(*backward(*block, **options)))

    return {
        "swapped": then(lambda d_q, d_k, d_v: (d_q, d_v, d_k)),
        "summed": then(lambda d_q, d_k, d_v: (d_q, d_k + d_v, d_k + d_v)),
        "OwnQueriesOnly": lambda: mock.patch.object(module, name, OwnQueriesOnly(backward)),
    }

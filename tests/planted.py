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

import os

import pytest
from hypothesis import settings

from tests.ranks import WORLDS, Ranks

# The same examples in every run, and no limit on the time of one: a busy machine is no failure.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("steady")

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # for tests/test_jax_ring.py: JAX reads it when it begins to work


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="module", params=WORLDS)  # tests of a module are grouped by world: to form another takes a while
def world_size(request):
    return request.param

"""What all tests share: the steady examples of Hypothesis, the pool of ranks, and the order of the suite."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from ringlab.support.processes import PRELOAD, RankContext, Ranks
from tests.attention import WORLDS
from tests.concepts import LATER

# The same examples in every run, and no limit on the time of one: a busy machine is no failure.
settings.register_profile("steady", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("steady")

# jsonschema, which checks notebooks, would parse a grammar of web addresses when imported: seconds that no test needs.
sys.modules.setdefault("rfc3987_syntax", None)
os.environ.pop("WORLD_SIZE", None)  # the doctor refuses it
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # for tests/ways/test_jax.py: JAX reads it when it begins to work
WARM = Path(__file__).with_name("wrong") / "warm.py"
# Ranks are forks of one process. What most of their work imports is imported there, once and not once a rank.
PRELOAD += ["pytest", "hypothesis", "tests.every_way", "ring_doctor.asking.examination"]


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """What starts a script or a module as Python does, in a fork of a process that has imported torch already."""
    at = tmp_path_factory.mktemp("warm") / "socket"
    (start := at.with_name("python")).write_text(f'#!/bin/sh\nexec {sys.executable} -S {WARM} {at} "$@"\n')
    start.chmod(0o755)
    with subprocess.Popen([sys.executable, WARM, at], env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        while not at.exists():
            assert server.poll() is None
            time.sleep(0.05)
        yield start
        server.kill()


@pytest.fixture
def alone():
    """A world of one rank in this process: what differs is the mistake, not the number of ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankContext(0, 1, torch.device("cpu"), "alone")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=WORLDS)  # tests of a module are grouped by world: to form another takes a while
def world_size(request):
    return request.param


# How `make test` spreads the suite over the cores. These files' tests take seconds each: they begin first, so that no
# core is left with one at the end.
LONG = ("doctor_running_jobs", "notebooks", "hugging_face_trainer", "models_train", "foreign_project")
LONG += ("bench", "doctor_whole_model", "doctor_command", "doctor_sick_rings", "doctor_in_ci")
LONG += ("verdicts", "figures", "pages", "schedules", "trainable_ring")
# The tests of these files share what takes seconds to make, so they run on one core.
TOGETHER = {"figures": "figures", "notebooks": "kernel", "house": "house"}
TOGETHER |= {"foreign_project": "environment", "hugging_face_trainer": "trainer"}
TOGETHER |= {"doctor_running_jobs": "jobs", "doctor_whole_model": "jobs"}


# Whole models are slow; so is JAX, which compiles programs, and the doctor, which asks hundreds of questions. What the
# later chapters, the benches and the planner add is slow too, so that `make test` takes a reader of the first ones two
# minutes.
SLOW = ("models_", "hugging_face", "every_model", "jax", "fused_merge", "doctor_", "bench", "command", *sorted(LATER))

# These tests of the doctor start no processes, or few.
QUICK = ("doctor_questions", "doctor_way_in", "doctor_in_ci")


def name_of(path):
    """masks for tests/ring/test_masks.py, models_train for tests/models/test_train.py."""
    folder, name = path.parent.name, path.stem.removeprefix("test_")
    return f"{folder}_{name}" if folder in ("doctor", "models") else name


def is_slow(path):
    return name_of(path).startswith(SLOW) and name_of(path) not in QUICK


def pytest_addoption(parser):
    words = "where tests/test_on_a_gpu.py runs; cpu: with gloo"
    parser.addoption("--gpu", choices=("cuda", "cpu"), default="cuda", help=words)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and item.config.option.gpu == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; --gpu=cpu tries the same with gloo")


def pytest_ignore_collect(collection_path, config):
    """Files of slow tests, or of a GPU, are not even imported where none is wanted. None: ask the other plug-ins."""
    asked, on_gpus = config.option.markexpr, collection_path.name == "test_on_a_gpu.py"
    return ("not slow" in asked and is_slow(collection_path)) or ("not gpu" in asked and on_gpus) or None


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(config, items):
    names = {item: name_of(item.path) for item in items}
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    if not hasattr(config, "workerinput"):  # xdist: only its workers collect
        return
    items.sort(key=lambda item: LONG.index(names[item]) if names[item] in LONG else len(LONG))  # a stable sort
    for item in items:
        if names[item] in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(TOGETHER[names[item]]))


def pytest_collection_finish(session):
    """Where models of transformers are tested, it is imported once, and not once a rank: that takes some seconds."""
    gc.freeze()  # a collection, as at the end of a job, then looks at what tests make, and not at all modules: 0.7 s
    tested = {name_of(item.path) for item in session.items}
    if any(name.startswith(("hugging_face", "every_model")) for name in tested):
        PRELOAD.append("ringlab.hugging_face.generate")
    if "hugging_face_trainer" in tested:  # and TRL
        PRELOAD.extend(["ringlab.hugging_face.trainer", "trl.trainer.sft_trainer"])
    if "docs" in tested:  # and what DDP and collectives with gradients import
        PRELOAD.append("torch._dynamo")
    if tested & {"models_train", "models_damage"}:  # and checkpoints
        PRELOAD.append("ringlab.models.train")

"""The file of a machine: written and read back, and every file that the planner must not take is refused by name."""

import json
import math
from dataclasses import fields, replace

import pytest

from ringlab.planning.machine import FIELDS, FORMAT, VERSION, read_machine, write_machine
from ringlab.planning.ways import Cluster

HOSTS = Cluster(2, 4, 1e12, 4e11, 12.5e9, 2, 2e12, 1e-5, 2e-5, 8e11, 3e-6, 1.1, 1.2)
ONE = Cluster(1, 1, 1e12, math.inf)  # no wire at all


@pytest.mark.parametrize("cluster", [HOSTS, ONE], ids=["hosts", "one device"])
def test_what_is_written_is_read(cluster, tmp_path):
    path = tmp_path / "machine.json"
    write_machine(path, replace(cluster, memory_bandwidth=2e12), computing=[{"length": 128}])
    assert read_machine(path) == replace(cluster, memory_bandwidth=2e12)
    assert "Infinity" not in path.read_text()  # which is no JSON
    assert json.loads(path.read_text())["computing"] == [{"length": 128}]


def test_another_version_comes_with_other_fields():
    """A field more or less makes the files of this version unreadable: raise VERSION, then change this list."""
    assert VERSION == 1
    assert {field.name for field in fields(Cluster)} - set(FIELDS) == {"multiprocessors"}
    assert " ".join(FIELDS) == (
        "hosts per_host flops bandwidth host_bandwidth nics memory_bandwidth latency host_latency backward_flops "
        "launch slowdown causal"
    )


def changed(**numbers):
    """A file's content, with other numbers of the cluster; "gone": without this field."""
    cluster = {name: getattr(HOSTS, name) for name in FIELDS} | numbers
    return {"format": FORMAT, "version": VERSION, "cluster": {k: v for k, v in cluster.items() if v != "gone"}}


REFUSED = {
    "no JSON": ("{", ["cannot be read: Expecting", "ringlab.planning.calibrate --out"]),
    "nested without end": ("[" * 10**5, ["cannot be read: maximum recursion"]),
    "no object": ([1], ["has format and version list", f"expected ('{FORMAT}', {VERSION})"]),
    "another file": ({"rows": []}, ["has format and version (None, None)"]),
    "later version": ({**changed(), "version": VERSION + 1}, [f"{VERSION + 1}); expected", "measure again"]),
    "no cluster": ({"format": FORMAT, "version": VERSION}, ["cluster has None; expected the fields ['hosts'"]),
    "a field less": (changed(launch="gone"), ["cluster has {", "expected the fields"]),
    "a field more": (changed(colour=1.0), ["'colour'", "expected the fields"]),
    "text": (changed(flops="1e12"), ["flops is '1e12'; expected a number, 0 or 1000 to 1e+20\n"]),
    "null": (changed(flops=None), ["flops is None; expected a number"]),
    "not a number": (changed(bandwidth=math.nan), ["bandwidth is nan; expected a number", "or null\n"]),
    "endless": (changed(latency=math.inf), ["latency is inf; expected a number, 0 or 0 to 1000\n"]),
    "half a host": (changed(hosts=1.5), ["hosts is 1.5; expected a whole number"]),
    "true": (changed(per_host=True), ["per_host is True; expected a whole number"]),
    "no speed": (changed(flops=0), ["rates above 0"]),
    "too long a number": (changed(flops=10**400), ["flops is 1000", "0; expected a number, 0 or 1000 to 1e+20"]),
    "slower than a clock": (changed(flops=1e-300), ["flops is 1e-300; expected a number, 0 or 1000 to 1e+20"]),
    "longer than a clock": (changed(launch=1e308), ["launch is 1e+308; expected a number, 0 or 0 to 1000"]),
    "negative": (changed(latency=-1), ["latency is -1; expected a number, 0 or 0 to 1000"]),
    "too many NICs": (changed(nics=5), ["nics is 5; expected 1 to 4"]),
    "faster beside messages": (changed(slowdown=0.5), ["slowdown and causal of 1 or more"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_none_is_refused_by_name(what, tmp_path):
    content, words = REFUSED[what]
    path = tmp_path / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=r"machine\.json") as refused:
        read_machine(path)
    for each in words:
        assert each in f"{refused.value}\n"


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"calibrate --out FILE") as refused:
            read_machine(path)
        assert str(refused.value).startswith(f"{path} cannot be read: ")

"""A process' index among the hosts, from options and environment; wrong settings are named."""

import socket
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax._src import xla_bridge

from nagjax.errors import UserError
from nagjax.train.distributed import hosts as hosts_module
from nagjax.train.distributed import mesh as mesh_module
from nagjax.train.distributed.hosts import HostsConfig, Place, _wait_for_first, connect, find
from nagjax.train.distributed.mesh import batch_share

PLAIN = {"COORDINATOR_ADDRESS": "10.0.0.2:8476", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-4]"}


@pytest.mark.parametrize(
    "config, environment, cloud_tpu, place",
    [
        pytest.param(HostsConfig(), {}, False, None, id="alone"),
        pytest.param(HostsConfig("a:1", 2, 0), {}, False, Place("a:1", 2, 0), id="options"),
        pytest.param(HostsConfig(), PLAIN, False, Place("10.0.0.2:8476", 4, 3), id="variables"),
        pytest.param(HostsConfig(index=1), PLAIN, True, Place("10.0.0.2:8476", 4, 1), id="options-first"),
        pytest.param(HostsConfig("a:1", 2), {"JOB_COMPLETION_INDEX": "1"}, False, Place("a:1", 2, 1), id="indexed-job"),
        pytest.param(HostsConfig(), {"JOB_COMPLETION_INDEX": "1"}, False, None, id="indexed-job-of-ones"),
        pytest.param(HostsConfig(), SLURM, False, Place(), id="slurm"),
        pytest.param(HostsConfig(), SLURM | {"SLURM_NTASKS": "1"}, False, None, id="slurm-one-task"),
        pytest.param(HostsConfig(), SLURM | {"SLURM_NTASKS": ""}, False, None, id="slurm-no-number"),
        pytest.param(HostsConfig(), {"SLURM_NTASKS": "four"}, False, None, id="no-slurm-job"),
        pytest.param(HostsConfig(), {}, True, Place(), id="cloud-tpu"),
        pytest.param(HostsConfig(), {"JOB_COMPLETION_INDEX": "1"}, True, Place(), id="gke"),
        pytest.param(HostsConfig(count=1), PLAIN | SLURM, True, None, id="told-to-be-alone"),
    ],
)
def test_who_is_where(config, environment, cloud_tpu, place):
    assert find(config, environment, cloud_tpu) == place


@pytest.mark.parametrize(
    "environment, several",
    [
        pytest.param({}, True, id="a-vm"),
        pytest.param({"TPU_SKIP_MDS_QUERY": "1"}, False, id="no-chip"),
        pytest.param({"TPU_SKIP_MDS_QUERY": "true", "TPU_WORKER_HOSTNAMES": "localhost"}, False, id="gke-one-host"),
        pytest.param({"TPU_SKIP_MDS_QUERY": "true", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}, True, id="gke-slice"),
        pytest.param({"TPU_SKIP_MDS_QUERY": "true", "TPU_PROCESS_ADDRESSES": "a:1,b:1"}, True, id="gke-addresses"),
        pytest.param({"TPU_SKIP_MDS_QUERY": "true", "MEGASCALE_NUM_SLICES": "2"}, True, id="gke-slices"),
        pytest.param({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, False, id="not-asked-for"),
    ],
)
def test_hosts_of_a_tpu_look_for_each_other(environment, several, monkeypatch):
    """On GKE, too, where the variable that jax sets without a chip is set in every pod."""
    monkeypatch.setattr(hosts_module.importlib.util, "find_spec", lambda name: object())
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hosts_module._on_cloud_tpu() == several


@pytest.mark.parametrize(
    "config, environment, field, words",
    [
        (HostsConfig("a:1"), {}, "NUM_PROCESSES", "hosts.coordinator = 'a:1' is given: set it, or give --hosts.count"),
        (HostsConfig(), {"NUM_PROCESSES": "2"}, "COORDINATOR_ADDRESS", "--hosts.coordinator ADDRESS:PORT"),
        (HostsConfig("a:1", 2), {}, "PROCESS_ID", "--hosts.index"),
        (HostsConfig(), PLAIN | {"PROCESS_ID": "4"}, "PROCESS_ID", "from 0 to 3: NUM_PROCESSES is 4"),
        (HostsConfig(), PLAIN | {"PROCESS_ID": "one"}, "PROCESS_ID", "whole number"),
        (HostsConfig(), PLAIN | {"NUM_PROCESSES": "\u00b2"}, "NUM_PROCESSES", "whole number"),
        (HostsConfig(coordinator="a"), PLAIN, "hosts.coordinator", "ADDRESS:PORT"),
        (HostsConfig(), PLAIN | {"NUM_PROCESSES": "0"}, "NUM_PROCESSES", "at least 1"),
        (HostsConfig(), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "SLURM_NTASKS", "with srun"),
        (HostsConfig(), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "four"}, "SLURM_NTASKS", "whole number"),
    ],
)
def test_what_is_wrong_is_named(config, environment, field, words):
    with pytest.raises(UserError, match=words) as caught:
        find(config, environment, False)
    assert caught.value.field == field


def test_a_first_host_that_is_not_there_is_an_error():
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(UserError, match="did not find each other.*open the port") as caught:
            connect(HostsConfig(address, 2, 1, timeout=0))
    assert caught.value.field == "hosts.coordinator"


def test_a_first_host_that_waits_in_vain_ends_with_one_line():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = ["--hosts.coordinator", address, "--hosts.count", "2", "--hosts.index", "0", "--hosts.timeout", "2"]
    command = [sys.executable, "-m", "nagjax", "train", "--depth", "1", *hosts]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2 and "Check failure" not in found.stderr
    (line,) = (line for line in found.stderr.splitlines() if line.startswith("nagjax: error: "))
    assert "hosts.timeout = 2: not all 2 hosts have come in this time: start every one" in line and address in line


@pytest.mark.parametrize("place", [PLAIN, SLURM], ids=["spelled-out", "slurm"])
@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ({}, "0"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "0"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),2"}, "0"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, "all"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, "all"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "JAX_LOCAL_DEVICE_IDS": "0"}, "0"),
    ],
)
def test_a_process_alone_on_its_node_has_all_its_gpus(place, environment, visible, monkeypatch):
    flag = xla_bridge.CUDA_VISIBLE_DEVICES  # jax.config writes it, and reads it not
    before = flag.value

    def takes_the_first(*_, **__):  # as jax does under SLURM
        jax.config.update("jax_cuda_visible_devices", "0")

    monkeypatch.setattr(hosts_module.os, "environ", place | environment)
    monkeypatch.setattr(hosts_module, "_wait_for_first", lambda *_: None)
    monkeypatch.setattr(hosts_module.jax.distributed, "initialize", takes_the_first)
    try:
        connect(HostsConfig())
        assert flag.value == visible
    finally:
        jax.config.update("jax_cuda_visible_devices", before)


def test_the_first_host_may_have_an_address_of_version_6():
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listening:
        _wait_for_first(f"[::1]:{listening.getsockname()[1]}", HostsConfig(), 0.0)


def shares(monkeypatch, owners, tensor=1):
    """Parts of the batch by host; `owners` are the hosts of the devices in the mesh's order."""
    devices = np.array([types.SimpleNamespace(process_index=owner) for owner in owners]).reshape(-1, 1, tensor)
    shape = {"data": len(devices), "fsdp": 1, "expert": 1, "tensor": tensor, "sequence": 1}
    mesh = types.SimpleNamespace(devices=devices, shape=shape)
    count, found = max(owners) + 1, []
    for host in range(count):
        numbers = {"process_index": lambda host=host: host, "process_count": lambda: count}
        monkeypatch.setattr(mesh_module, "jax", types.SimpleNamespace(**numbers))
        found.append(tuple(batch_share(mesh).values()))
    return found


def test_hosts_load_the_rows_they_hold(monkeypatch):
    assert shares(monkeypatch, [0] * 4) == [(0, 1)]
    assert shares(monkeypatch, [0] * 4 + [1] * 4) == [(0, 2), (1, 2)]
    assert shares(monkeypatch, [0, 1, 2, 3], tensor=2) == [(0, 2), (0, 2), (1, 2), (1, 2)], "two hosts, the same rows"
    for uneven in ([0, 1, 0, 1], [0, 0, 0, 1]):
        with pytest.raises(UserError, match="evenly"):
            shares(monkeypatch, uneven)


def test_one_process_holds_everything():
    mesh = mesh_module.make_mesh(mesh_module.MeshConfig(data=2, tensor=2), jax.devices()[:4])
    assert batch_share(mesh) == {"process_index": 0, "process_count": 1}

"""Addresses, folders and the lock of a lab."""

import datetime
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep_lab import certs, guardian, kubeconfig, places, present, procs
from everstep_lab.config import LabConfig
from everstep_lab.seam import LabError


def test_addresses_follow_from_the_network() -> None:
    here = places.Places.from_env({"EVERSTEP_LAB_NETWORK": "70"})
    assert (here.node_ip(3), here.pod_prefix(3)) == ("127.70.0.3", "127.70.3.")
    assert here.root != places.Places.from_env({}).root


@pytest.mark.parametrize("value", ["63", "96", "x", ""])
def test_a_network_outside_its_range_is_refused(value: str) -> None:
    with pytest.raises(LabError, match="EVERSTEP_LAB_NETWORK"):
        places.Places.from_env({"EVERSTEP_LAB_NETWORK": value})


def test_a_taken_port_is_replaced_by_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert places.choose_port("127.0.0.1", port) != port


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (LabConfig(nodes=201), "--nodes 201"),
        (LabConfig(gpus_per_node=17), "--gpus-per-node 17"),
        (LabConfig(node_grace_seconds=1), "--node-grace-seconds 1"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_its_option(config: LabConfig, option: str) -> None:
    with pytest.raises(LabError, match=option):
        config.check()


def test_only_one_holds_the_lock_and_its_successor_gets_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "lab" / "lock"
    first = guardian.take_lock(path)
    assert first is not None
    assert guardian.take_lock(path) is None
    guardian.remove(path.parent, tmp_path / "memory")
    second = guardian.take_lock(path)
    assert second is not None
    os.close(first)
    assert guardian.take_lock(path) is None
    os.close(second)


def test_the_lock_can_be_taken_while_its_last_holder_removes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder goes between the moment when it is made and the moment when its file is opened."""
    made: list[Path] = []

    def make(path: Path, **given: Any) -> None:
        os.makedirs(path, exist_ok=True)
        if not made:
            path.rmdir()
        made.append(path)

    monkeypatch.setattr(Path, "mkdir", make)
    lock = guardian.take_lock(tmp_path / "lab" / "lock")
    assert lock is not None
    os.close(lock)
    assert len(made) == 2


def test_leftover_processes_are_found_by_their_mark(tmp_path: Path) -> None:
    child = procs.spawn(["sleep", "60"], log=None, mark=tmp_path)
    try:
        assert procs.marked(tmp_path) == [child.pid]
        assert child.pid in procs.descendants(os.getpid())
        assert procs.marked(tmp_path / "other") == []
    finally:
        procs.stop(child)
    assert procs.marked(tmp_path) == []


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys; from everstep_lab import procs;"
        f"child = procs.spawn(['sleep', '60'], log=None, mark={str(tmp_path)!r});"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    descriptor = os.pidfd_open(child)
    parent.kill()
    parent.communicate()
    assert procs.marked(tmp_path) in ([], [child])
    assert select.select([descriptor], [], [], 10)[0], "the child outlived its parent"
    os.close(descriptor)


def test_a_kubeconfig_of_ours_is_known_and_read_back(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    kubeconfig.write_private(ours, kubeconfig.build("https://127.0.0.1:6443", b"ca", "t", "admin"))
    theirs.write_text("apiVersion: v1\n")
    assert kubeconfig.is_ours(ours)
    assert not kubeconfig.is_ours(theirs)
    assert ours.stat().st_mode & 0o077 == 0
    assert kubeconfig.read(ours) == ("https://127.0.0.1:6443", "t")


def test_openssl_accepts_a_node_certificate_for_its_address(tmp_path: Path) -> None:
    now = datetime.datetime.fromtimestamp(os.stat(tmp_path).st_mtime, datetime.UTC)
    authority = certs.Authority(tmp_path, now)
    crt, key = authority.issue("node-1", "system:node:node-1", ["127.64.0.1", "node-1"])
    verify = ["openssl", "verify", "-CAfile", str(authority.certificate)]
    done = subprocess.run(
        [*verify, "-verify_ip", "127.64.0.1", str(crt)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert key.stat().st_mode & 0o077 == 0


GPU = {"index": 0, "uuid": "GPU-a", "present": True, "healthy": True, "xid": 0, "pod": "j-0-1"}
NODE = {
    "ip": "127.64.0.1", "powered": True, "connected": True, "exporter": "ok", "faults": [],
    "gpus": [GPU], "pods": [{"name": "default/j-0-1", "ip": "127.64.1.10", "running": True}],
}  # fmt: skip
LAB = {
    "supervisor": 1, "up_seconds": 9.6, "memory_bytes": 655_400_000, "api": "https://a",
    "kubeconfig": "/k", "kubectl": "/b", "logs": "/l",
    "operator": {"pid": None, "ended": None, "metrics": "m"},
    "objectstore": {"pid": 7, "endpoint": "http://s", "bucket": "everstep"},
    "nodes": {"node-1": NODE},
}  # fmt: skip


def test_status_shows_what_runs_and_where() -> None:
    text = present.render_status(LAB)
    assert "operator    stopped" in text
    assert "S3 server   pid 7, http://s, bucket everstep" in text
    assert "node-1    127.64.0.1    1     ok        0: j-0-1, ok" in text


def test_status_shows_what_is_broken_on_purpose() -> None:
    lost = {**GPU, "present": False, "healthy": False, "xid": 79, "pod": None}
    node = {**NODE, "gpus": [lost], "connected": False, "faults": ["GPU 0, XID 79: off the bus"]}
    text = present.render_status({**LAB, "nodes": {"node-1": node}})
    assert "0: free, lost" in text
    assert "  cut off from the API server\n  GPU 0, XID 79: off the bus" in text

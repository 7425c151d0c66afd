"""A lab starts, can be controlled, and leaves nothing behind, however it ends.

Each lab here has its own network, so that it does not disturb a developer's lab.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep_lab import procs
from everstep_lab.client import Lab
from everstep_lab.config import LabConfig
from everstep_lab.seam import LabError
from everstep_lab.supervisor import is_node_ready

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

OTHER_NETWORK = "92"
BARE = LabConfig(nodes=0, operator=False)
UNIQUE_SLEEP = "86399.5"
DETACHING_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "detaching"},
    "spec": {
        "containers": [
            {
                "name": "c",
                "image": "plain/python:dev",
                "command": ["sh", "-c", f"setsid sleep {UNIQUE_SLEEP} & exec sleep {UNIQUE_SLEEP}"],
            }
        ]
    },
}


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab beside the shared one that a test may break. Only one lab can run per network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_LAB_NETWORK", OTHER_NETWORK)
        with Lab(BARE, say=print) as lab:
            yield lab


def leftovers(lab: Lab) -> list[object]:
    files = [p for p in (lab.places.root, lab.places.memory) if p.exists()]
    return [*files, *procs.marked(lab.places.root)]


def running(word: str) -> list[str]:
    """Return the command lines of all other processes that contain the word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_text(errors="replace").replace("\0", " ")
            if word in line and entry.parent.name != str(os.getpid()):
                found.append(line)
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def wait_for_end(pid: int, seconds: float = 30.0) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], seconds)[0], f"{pid} still runs"
    finally:
        os.close(descriptor)


def run_cli(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "everstep_lab.cli", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


async def test_up_serves_kubectl_and_the_api(shared: Lab) -> None:
    assert "v1.36.3" in shared.kubectl("version")
    node = json.loads(shared.kubectl("get", "node", "node-1", "-o", "json"))
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "2"
    assert is_node_ready(node)
    async with shared.api() as api:
        secret = await api.get("/api/v1/namespaces/default/secrets/object-store")
    assert set(secret["data"]) == set(shared.store_environment)
    assert shared.status()["memory_bytes"] > 100e6
    assert shared.places.root.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("on_shared_network")
def test_a_second_lab_is_refused_with_the_first_ones_pid_and_the_way_out(
    shared: Lab,
) -> None:
    refused = run_cli("up", "--nodes", "0")
    assert refused.returncode == 1
    assert f"(supervisor pid {shared.described['supervisor']})" in refused.stderr
    assert "everstep-lab down" in refused.stderr


def test_a_supervisor_killed_with_sigkill_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVERSTEP_LAB_NETWORK", OTHER_NETWORK)
    with Lab(LabConfig(nodes=1, operator=False)) as lab:
        lab.kubectl("apply", "-f", "-", stdin=json.dumps(DETACHING_POD))
        lab.kubectl("wait", "pod", "detaching", "--for=condition=Ready", "--timeout=60s")
        assert wait_until(lambda: len(running(UNIQUE_SLEEP)) == 2)
        os.kill(lab.described["supervisor"], signal.SIGKILL)
        wait_for_end(lab.described["guardian"])
        assert procs.marked(lab.places.root) == []
        assert running(UNIQUE_SLEEP) == []
        assert "no lab is running" in lab.down()
        assert leftovers(lab) == []


@pytest.mark.long
def test_guardian_and_supervisor_killed_together_leave_no_process_after_down(lab: Lab) -> None:
    children = lab.described["control_plane"].values()
    for name in ("guardian", "supervisor"):
        os.kill(lab.described[name], signal.SIGKILL)
    for pid in children:
        if Path(f"/proc/{pid}").exists():
            wait_for_end(pid)
    lab.down()
    assert leftovers(lab) == []


@pytest.mark.long
def test_a_killed_guardian_makes_the_lab_go_down(lab: Lab) -> None:
    supervisor = lab.described["supervisor"]
    os.kill(lab.described["guardian"], signal.SIGKILL)
    if Path(f"/proc/{supervisor}").exists():
        wait_for_end(supervisor)
    lab.down()
    assert leftovers(lab) == []


@pytest.fixture
def copied_to(tmp_path: Path) -> Path:
    return tmp_path / "kubeconfig"


@pytest.fixture
def foreground(
    monkeypatch: pytest.MonkeyPatch, copied_to: Path
) -> Iterator["subprocess.Popen[str]"]:
    """Start `everstep-lab up --foreground`."""
    monkeypatch.setenv("EVERSTEP_LAB_NETWORK", OTHER_NETWORK)
    argv = ["up", "--nodes", "0", "--no-operator", "--foreground", f"--kubeconfig={copied_to}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep_lab.cli", *argv], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert any("Ctrl-C" in line for line in process.stdout)
        yield process
    finally:
        process.kill()
        process.communicate()
        Lab().down()


def test_ctrl_c_in_the_foreground_leaves_nothing(
    foreground: "subprocess.Popen[str]", copied_to: Path
) -> None:
    words = (f"--kubeconfig={copied_to}", "get", "serviceaccounts")
    assert "default" in Lab.running().kubectl(*words)
    foreground.send_signal(signal.SIGINT)
    said, _ = foreground.communicate(timeout=60)
    assert "the lab is down" in said
    assert leftovers(Lab()) == []
    assert not copied_to.exists()


@pytest.mark.long
def test_a_foreground_lab_ends_with_its_command(foreground: "subprocess.Popen[str]") -> None:
    guardian = Lab.running().described["guardian"]
    foreground.kill()
    wait_for_end(guardian)
    assert leftovers(Lab()) == []


def test_the_object_store_goes_away_and_comes_back_on_the_same_address(
    shared: Lab,
) -> None:
    before = shared.status()["objectstore"]
    assert "stopped" in shared.objectstore_stop()
    assert shared.status()["objectstore"]["pid"] is None
    shared.objectstore_start()
    after = shared.status()["objectstore"]
    assert after["endpoint"] == before["endpoint"]
    assert after["environment"] == before["environment"]


@pytest.mark.long
def test_a_control_plane_that_broke_takes_the_lab_down_and_leaves_one_log(lab: Lab) -> None:
    guardian = lab.described["guardian"]
    os.kill(lab.described["control_plane"]["etcd"], signal.SIGKILL)
    wait_for_end(guardian)
    kept = lab.places.root.with_name(f"{lab.places.root.name}.failed.log")
    assert "etcd ended with -9" in kept.read_text()
    lab.down()
    assert not kept.exists()
    assert leftovers(lab) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status",), "`everstep-lab up` starts one"),
        (("fault", "node-1", "--kill-node"), "no lab is running"),
        (("fault", "node-1", "--gpu", "0"), "--gpu and --xid go together"),
        (("fault", "node-1"), "no fault is named"),
        (("up", "--nodes", "201"), "--nodes 201"),
        (("up", "--kubeconfig", "/etc/hostname"), "choose another file"),
    ],
)
def test_without_a_lab_or_sense_a_command_says_what_to_type(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_LAB_NETWORK", OTHER_NETWORK)
    done = run_cli(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_on_a_node_that_is_not_there_is_refused(shared: Lab) -> None:
    with pytest.raises(LabError, match="no node 'node-7'"):
        shared.fault("node-7", kill_node=True)

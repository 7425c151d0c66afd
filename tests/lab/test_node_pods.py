"""Pods on a real control plane: what a user of kubectl sees on a simulated node."""

import contextlib
import json
import select
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_contract.env import AGENT_SOCKET
from everstep_lab.client import Lab as LabClass
from everstep_lab.seam import LabError

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

Pod = dict[str, Any]
PLAIN = "plain/python:dev"
IDLE = "import time; print('up', flush=True); time.sleep(1000)"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: print('SIGTERM', flush=True));" + IDLE
)


AGENT = f"""
import os, subprocess, sys
env = {{**os.environ, "{AGENT_SOCKET}": "s"}}
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
workers = [subprocess.Popen(sleep, env=env) for _ in range(2)]
print("up", flush=True)
pid, status = os.wait()
rank = [worker.pid for worker in workers].index(pid)
print("worker", rank, "died of signal", os.WTERMSIG(status), flush=True)
os.wait()
"""


@pytest.fixture
def lab(shared: LabClass) -> LabClass:
    return shared


@pytest.fixture
def apply(lab: LabClass) -> Iterator[Callable[..., str]]:
    """Return a function that creates pods by name. At the end, delete them and wait until they are gone."""
    names: list[str] = []

    def apply(name: str, script: str = IDLE, **fields: Any) -> str:
        names.append(name)
        lab.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(a_pod(name, script, **fields)))
        return name

    yield apply
    lab.kubectl("delete", "pod", *names, "--ignore-not-found", "--now")


def a_pod(
    name: str, script: str = IDLE, *, container: Pod | None = None, gpus: int = 0, **spec: Any
) -> Pod:
    main: Pod = {
        "name": "main",
        "image": PLAIN,
        "command": ["python", "-u", "-c", script],
        **(container or {}),
    }
    if gpus:
        main["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    defaults = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"shown": "yes"}},
        "spec": {**defaults, **spec, "containers": [main]},
    }


def get(lab: LabClass, kind: str, name: str, *more: str) -> Pod:
    document: Pod = json.loads(lab.kubectl("get", kind, name, "-o", "json", *more))
    return document


def wait(lab: LabClass, name: str, path: str, value: str, seconds: int = 60) -> Pod:
    """Wait with `kubectl wait` until the field has the value; return the pod."""
    lab.kubectl(
        "wait", f"pod/{name}", f"--for=jsonpath={{{path}}}={value}", f"--timeout={seconds}s"
    )
    return get(lab, "pod", name)


def waiting_reason(lab: LabClass, name: str, reason: str) -> Pod:
    state = ".status.containerStatuses[0].state.waiting"
    pod = wait(lab, name, f"{state}.reason", reason)
    waiting: Pod = pod["status"]["containerStatuses"][0]["state"]["waiting"]
    return waiting


def is_running(lab: LabClass, name: str) -> Pod:
    lab.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s")
    return get(lab, "pod", name)


def exporter_of(lab: LabClass, node: str) -> Pod:
    selector = ("-l", "app.kubernetes.io/name=dcgm-exporter")
    fields = f"--field-selector=spec.nodeName={node}"
    (pod,) = json.loads(
        lab.kubectl("get", "pods", "-n", "kube-system", *selector, fields, "-o", "json")
    )["items"]
    return dict(pod)


def page(lab: LabClass, node: str) -> str:
    pod = exporter_of(lab, node)
    address = f"http://{pod['status']['podIP']}:9400/metrics"
    with urllib.request.urlopen(address, timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def until(condition: Callable[[], bool], lab: LabClass, what: str) -> None:
    """Check every 0.2 s for up to a minute, for conditions that `kubectl wait` does not know."""
    for _ in range(300):
        if condition():
            return
        pause()
    raise AssertionError(f"never saw {what}; the lab says {lab.status()['nodes']}")


def pause() -> None:
    select.select([], [], [], 0.2)


# --- running ------------------------------------------------------------------------------------


def test_a_pod_runs_to_its_end_and_its_log_and_message_are_kept(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    script = (
        "open('/dev/termination-log', 'w').write('the end'); print('hello'); raise SystemExit(3)"
    )
    apply("ends", script)
    pod = wait(lab, "ends", ".status.phase", "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (3, "Error", "the end")
    assert lab.kubectl("logs", "ends") == "hello\n"


def test_what_a_pod_refers_to_reaches_its_environment_and_files(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    lab.kubectl("create", "configmap", "conf", "--from-literal=greeting=hello")
    lab.kubectl("create", "secret", "generic", "keys", "--from-literal=password=s3cret")
    env = [
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CONF", "value": "/conf/greeting"},
        {"name": "LABELS", "value": "/about/labels"},
    ]
    script = (
        "import os; e = os.environ; "
        "print(e['IP'], e['password'], open(e['CONF']).read(), open(e['LABELS']).read())"
    )
    labels = [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]
    apply(
        "refers",
        script,
        container={
            "env": env,
            "envFrom": [{"secretRef": {"name": "keys"}}],
            "volumeMounts": [
                {"name": "c", "mountPath": "/conf"}, {"name": "d", "mountPath": "/about"},
            ],
        },
        volumes=[
            {"name": "c", "configMap": {"name": "conf"}},
            {"name": "d", "downwardAPI": {"items": labels}},
        ],
    )  # fmt: skip
    pod = wait(lab, "refers", ".status.phase", "Succeeded")
    said = lab.kubectl("logs", "refers").split()
    # The API server adds labels with the topology of the node.
    assert said[:3] == [pod["status"]["podIP"], "s3cret", "hello"]
    assert 'shown="yes"' in said


def test_a_secret_that_comes_late_is_waited_for(lab: LabClass, apply: Callable[..., str]) -> None:
    apply("late", "print('got it')", container={"envFrom": [{"secretRef": {"name": "later"}}]})
    assert 'secret "later" not found' in waiting_reason(
        lab, "late", "CreateContainerConfigError"
    )["message"]  # fmt: skip
    lab.kubectl("create", "secret", "generic", "later", "--from-literal=a=b")
    wait(lab, "late", ".status.phase", "Succeeded")


def test_on_failure_a_container_is_started_again_and_then_backs_off(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    apply("crashes", "print('try'); raise SystemExit(9)", restartPolicy="OnFailure")
    waiting = waiting_reason(lab, "crashes", "CrashLoopBackOff")
    assert "back-off 10s restarting failed container=main" in waiting["message"]
    status = get(lab, "pod", "crashes")["status"]
    assert status["phase"] == "Running"
    assert status["containerStatuses"][0]["restartCount"] == 1
    assert status["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 9
    assert lab.kubectl("logs", "crashes", "--previous") == "try\n"


def test_a_command_that_the_image_lacks_ends_as_runc_says(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    apply("lacks", container={"command": ["everstep", "run", "train.py"]})
    pod = wait(lab, "lacks", ".status.phase", "Failed")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError")
    assert '"everstep": executable file not found' in ended["message"]


def test_an_image_that_is_not_listed_is_named_with_those_that_are(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    apply("unknown", container={"image": "nowhere/else:1"})
    message = waiting_reason(lab, "unknown", "ImagePullBackOff")["message"]
    assert 'Back-off pulling image "nowhere/else:1"' in message
    assert PLAIN in message


def test_a_volume_that_is_not_simulated_is_refused_in_a_sentence(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    apply("mounts", volumes=[{"name": "h", "hostPath": {"path": "/"}}])
    message = waiting_reason(lab, "mounts", "CreateContainerConfigError")["message"]
    assert message.startswith('the lab does not simulate hostPath volumes (volume "h")')
    assert message in lab.kubectl("describe", "pod", "mounts")


def test_exec_says_that_it_is_not_simulated(lab: LabClass, apply: Callable[..., str]) -> None:
    is_running(lab, apply("idle"))
    assert "exec is not simulated in the lab" in lab.kubectl(
        "exec", "idle", "--", "ls", check=False
    )  # fmt: skip


def test_logs_are_followed_until_the_container_ends(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    script = "import time\nfor i in range(20): print('tick', i, flush=True); time.sleep(0.1)"
    is_running(lab, apply("ticks", script))
    assert lab.kubectl("logs", "-f", "ticks").splitlines()[-1] == "tick 19"


# --- deletion -----------------------------------------------------------------------------------


def test_a_pod_gets_its_grace_and_is_then_killed(lab: LabClass, apply: Callable[..., str]) -> None:
    is_running(lab, apply("stubborn", STUBBORN, terminationGracePeriodSeconds=2))
    until(lambda: "up" in lab.kubectl("logs", "stubborn"), lab, "the handler set")
    lab.kubectl("delete", "pod", "stubborn", "--wait=false")
    until(lambda: "SIGTERM" in lab.kubectl("logs", "stubborn", check=False), lab, "the SIGTERM")
    lab.kubectl("wait", "pod/stubborn", "--for=delete", "--timeout=20s")


def test_a_pod_deleted_by_force_leaves_no_process(lab: LabClass, apply: Callable[..., str]) -> None:
    mark = "deleted by force"
    is_running(lab, apply("forced", f"{STUBBORN} # {mark}", terminationGracePeriodSeconds=300))
    assert processes_with(mark)
    lab.kubectl("delete", "pod", "forced", "--force", "--grace-period=0")
    until(lambda: "default/forced" not in pods_of(lab), lab, "the pod forgotten")
    until(lambda: not processes_with(mark), lab, "the end of its processes")


def processes_with(mark: str) -> list[str]:
    """The folders in /proc of the processes with these words in their command."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if mark.encode() in file.read_bytes():
                found.append(str(file.parent))
    return found


def pods_of(lab: LabClass) -> set[str]:
    """Return the names of the pods that the simulated nodes still have."""
    nodes = lab.status()["nodes"].values()
    return {pod["name"] for node in nodes for pod in node["pods"]}


def test_drain_leaves_the_exporter_and_takes_the_rest(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    node = is_running(lab, apply("drained"))["spec"]["nodeName"]
    exporter = exporter_of(lab, node)["metadata"]["uid"]
    lab.kubectl("drain", node, "--force", "--ignore-daemonsets", "--timeout=30s")
    lab.kubectl("uncordon", node)
    assert "NotFound" in lab.kubectl("get", "pod", "drained", check=False)
    assert exporter_of(lab, node)["metadata"]["uid"] == exporter


# --- faults -------------------------------------------------------------------------------------


def test_a_gpu_off_the_bus_takes_its_process_and_its_series(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    before = is_running(lab, apply("holds", gpus=1, nodeName="node-1", restartPolicy="OnFailure"))
    uuid = lab.status()["nodes"]["node-1"]["gpus"][0]["uuid"]
    until(lambda: 'pod="holds"' in page(lab, "node-1"), lab, "the pod on the exporter's page")
    lab.fault("node-1", gpu=0, xid=79)
    wait(lab, "holds", ".status.containerStatuses[0].restartCount", "1")
    until(lambda: uuid not in page(lab, "node-1"), lab, "the series gone")
    allocatable = ".status.allocatable.nvidia\\.com/gpu"
    lab.kubectl("wait", "node/node-1", f"--for=jsonpath={{{allocatable}}}=1", "--timeout=10s")
    lab.heal("node-1")
    lab.kubectl("wait", "node/node-1", f"--for=jsonpath={{{allocatable}}}=2", "--timeout=10s")
    until(lambda: uuid in page(lab, "node-1"), lab, "the series back")
    after = is_running(lab, "holds")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_of_two_workers_the_one_on_the_lost_gpu_dies_and_the_agent_lives(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    is_running(lab, apply("agent", AGENT, gpus=2, nodeName="node-2"))
    until(lambda: "up" in lab.kubectl("logs", "agent"), lab, "the workers up")
    lab.fault("node-2", gpu=1, xid=79)
    until(lambda: "died" in lab.kubectl("logs", "agent"), lab, "a death")
    assert lab.kubectl("logs", "agent").splitlines() == ["up", "worker 1 died of signal 9"]
    lab.kubectl("delete", "pod", "agent", "--now")
    lab.heal("node-2")


def test_a_failed_remap_leaves_the_process_alone(lab: LabClass, apply: Callable[..., str]) -> None:
    is_running(lab, apply("computes", gpus=1, nodeName="node-2"))
    lab.fault("node-2", gpu=0, xid=64)
    until(lambda: 'err_code="64"' in page(lab, "node-2"), lab, "the XID")
    assert is_running(lab, "computes")["status"]["containerStatuses"][0]["restartCount"] == 0


@pytest.mark.parametrize("word", ["silent", "http500"])
def test_a_silent_exporter_is_no_business_of_the_pods(
    lab: LabClass, apply: Callable[..., str], word: str
) -> None:
    is_running(lab, apply("unaware", nodeName="node-1"))
    lab.fault("node-1", exporter=word)
    with pytest.raises(urllib.error.URLError):
        page(lab, "node-1")
    lab.heal("node-1")
    assert page(lab, "node-1")
    assert is_running(lab, "unaware")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_killed_node_goes_not_ready_and_comes_back_with_another_boot(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    memory = [{"name": "m", "emptyDir": {"medium": "Memory"}}]
    script = "import os; p = os.environ['M']; print(os.listdir(p)); open(p + '/x', 'w');" + IDLE
    container = {
        "env": [{"name": "M", "value": "/memory"}],
        "volumeMounts": [{"name": "m", "mountPath": "/memory"}],
    }
    name = apply("victim", script, container=container, volumes=memory, nodeName="node-2",
                 restartPolicy="OnFailure")  # fmt: skip
    is_running(lab, name)
    boot = get(lab, "node", "node-2")["status"]["nodeInfo"]["bootID"]
    lab.fault("node-2", kill_node=True)
    lab.kubectl("wait", "node/node-2", "--for=condition=Ready=Unknown", "--timeout=60s")
    with pytest.raises(urllib.error.URLError):
        page(lab, "node-2")
    with pytest.raises(LabError, match="has no power"):
        lab.fault("node-2", gpu=0, xid=79)
    lab.heal("node-2")
    lab.kubectl("wait", "node/node-2", "--for=condition=Ready", "--timeout=30s")
    assert get(lab, "node", "node-2")["status"]["nodeInfo"]["bootID"] != boot
    pod = wait(lab, name, ".status.containerStatuses[0].restartCount", "1")
    last = pod["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (255, "Unknown")
    until(lambda: "up" in lab.kubectl("logs", name, check=False), lab, "the pod up again")
    assert lab.kubectl("logs", name).splitlines()[0] == "[]"


def test_behind_a_partition_processes_go_on_until_the_node_is_back(
    lab: LabClass, apply: Callable[..., str]
) -> None:
    is_running(lab, apply("zombie", nodeName="node-1"))
    lab.fault("node-1", partition=True)
    lab.kubectl("wait", "node/node-1", "--for=condition=Ready=Unknown", "--timeout=60s")
    lab.kubectl("delete", "pod", "zombie", "--force", "--grace-period=0")
    assert page(lab, "node-1")
    assert "default/zombie" in pods_of(lab)
    lab.heal("node-1")
    lab.kubectl("wait", "node/node-1", "--for=condition=Ready", "--timeout=30s")
    until(lambda: "default/zombie" not in pods_of(lab), lab, "the zombie gone")

"""Controls node containers: power, pause, connection to the API server, requests to lab-nodes."""

import json
import time
from collections.abc import Callable
from typing import Any

from everstep_lab.kind import places, tools
from everstep_lab.seam import BadRequestError, LabError

SOCKET = f"{places.NODE_FOLDER}/control.sock"
API_PORT = "6443"
_BOOT_SECONDS = 90.0
_MANIFEST = "/etc/kubernetes/manifests/kube-apiserver.yaml"
_ASIDE = "/etc/kubernetes/kube-apiserver.yaml.stopped"


def ask(node: str, path: str, body: object = None, *, timeout: float = 30.0) -> Any:
    """Send a request to the node's lab-node. Raises LabError if it refuses or does not run."""
    argv = [
        "exec", "--interactive", node, "curl", "--silent", "--show-error", "--max-time", "20",
        "--unix-socket", SOCKET, f"http://lab-node/{path}",
    ]  # fmt: skip
    if path != "status":
        argv += ["--request", "POST", "--data-binary", "@-"]
    answer = json.loads(tools.docker(*argv, stdin=json.dumps(body), timeout=timeout))
    if "error" in answer:
        raise BadRequestError(answer["error"])
    return answer["ok"]


def state(node: str) -> str:
    """The state of the node's container: running, paused, exited, …; `gone` if there is none."""
    done = tools.run(
        [tools.find("docker"), "inspect", "--format", "{{.State.Status}}", node], check=False
    )
    return done.stdout.strip() or "gone"


def lose_power(node: str) -> str:
    """Disconnect the node's network, then kill its container. `regain` boots it again.

    Its connections therefore stay open at the other end.
    """
    tools.docker("exec", node, "ip", "link", "set", "eth0", "down")
    tools.docker("kill", node)
    return "lost power"


def freeze(node: str) -> str:
    """Freeze the kubelet and the pods. Connections stay open. `regain` resumes the node."""
    tools.docker("pause", node)
    return "frozen, with kubelet and pods"


def cut_off(node: str, control_plane: str) -> str:
    """Cut node and pods off from the API server, in both directions. Other traffic continues."""
    if not is_cut_off(node, control_plane):
        _change_rules("-I", node, control_plane)
    return "cut off from the API server; its processes continue"


def is_cut_off(node: str, control_plane: str) -> bool:
    first = _rules(_address(control_plane))[0]
    argv = [tools.find("docker"), "exec", node, "iptables", "-C", *first]
    return tools.run(argv, check=False).returncode == 0


def reconnect(node: str, control_plane: str) -> str:
    _change_rules("-D", node, control_plane)
    return "reaches the API server again"


def regain(node: str) -> str | None:
    """Resume the node, or boot it and wait for its lab-node. None: there was nothing to do."""
    match state(node):
        case "running":
            return None
        case "paused":
            tools.docker("unpause", node)
            return "goes on"
        case "gone":
            raise LabError(
                f"the node's container {node} does not exist: run `everstep-lab down`, then `up --kind`"
            )
        case _:
            tools.docker("start", node)
            wait_for(lambda: _answers(node), f"{node} to boot", _BOOT_SECONDS)
            return "booted"


def describe(node: str, control_plane: str) -> dict[str, Any]:
    """The node's state, in the form of `Node.describe` of the local lab."""
    powered = state(node)
    known: dict[str, Any] = {"powered": powered == "running", "connected": True, "exporter": "off"}
    if powered == "paused":
        return {**known, "powered": True, "faults": ["frozen"]}
    if powered != "running":
        return known
    try:
        told = ask(node, "status")
    except LabError:
        told = {"faults": ["its lab-node does not answer"]}
    return {**known, "connected": not is_cut_off(node, control_plane), **told}


def stop_api_server(control_plane: str) -> str:
    """Move the API server's manifest aside, so that the kubelet ends the API server."""
    if not _running_api_server(control_plane):
        return "the API server is stopped already"
    tools.docker("exec", control_plane, "mv", _MANIFEST, _ASIDE)
    wait_for(lambda: not _running_api_server(control_plane), "the API server to end", 60.0)
    return "API server stopped"


def start_api_server(control_plane: str) -> str:
    tools.docker("exec", control_plane, "sh", "-c", f"[ ! -e {_ASIDE} ] || mv {_ASIDE} {_MANIFEST}")
    wait_for(lambda: _running_api_server(control_plane), "the API server to start", 90.0)
    return "API server started"


def wait_for(is_true: Callable[[], bool], what: str, seconds: float, every: float = 0.3) -> None:
    """Wait until `is_true` returns True. Raises LabError, which names `what`, after `seconds`."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            raise LabError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(every)


def _running_api_server(control_plane: str) -> bool:
    url = f"https://127.0.0.1:{API_PORT}/readyz"
    argv = [tools.find("docker"), "exec", control_plane, "curl", "-skf", "--max-time", "2", url]
    return tools.run(argv, check=False).returncode == 0


def _answers(node: str) -> bool:
    try:
        ask(node, "status", timeout=5)
    except (LabError, ValueError):
        return False
    return True


def _address(container: str) -> str:
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
    found = tools.docker("inspect", "--format", form, container).split()
    if not found:
        raise LabError(f"the container {container} has no address: is it running?")
    return found[0]


def _change_rules(how: str, node: str, control_plane: str) -> None:
    """Change all rules in one command: on a busy machine each `docker exec` takes seconds."""
    lines = [" ".join(["iptables", how, *rule]) for rule in _rules(_address(control_plane))]
    tools.docker("exec", node, "sh", "-c", " && ".join(lines))


def _rules(address: str) -> list[list[str]]:
    """Rules that drop requests and replies: connections go silent, as if a cable were unplugged."""
    away = ["-d", address, "-p", "tcp", "--dport", API_PORT, "-j", "DROP"]
    kubelet = ["-s", address, "-p", "tcp", "--dport", "10250", "-j", "DROP"]
    return [["OUTPUT", *away], ["FORWARD", *away], ["INPUT", *kubelet]]

"""Renders the supervisor's description of the lab as text for the terminal. Pure."""

from collections.abc import Mapping
from typing import Any


def render_up(lab: Mapping[str, Any]) -> str:
    """What `up` started, and commands to try next."""
    config = lab["config"]
    return "\n".join(
        [
            f"The lab is up after {lab['up_seconds']:.1f} s: {config['nodes']} nodes with "
            f"{gpu_count(config['gpus_per_node'])} each, {_megabytes(lab)} MB of memory in all.",
            "",
            f"  export KUBECONFIG={lab['kubeconfig']}",
            f"  alias kubectl={lab['kubectl']}",
            "  kubectl get nodes",
            "",
            "  everstep-lab status                          show processes, nodes, faults",
            "  everstep-lab fault node-2 --gpu 0 --xid 79   break a GPU",
            "  everstep-lab down                            end the lab",
        ]
    )


def render_status(lab: Mapping[str, Any]) -> str:
    operator, store = lab["operator"], lab["objectstore"]
    rows = [
        ("supervisor", f"pid {lab['supervisor']}, up {lab['up_seconds']:.0f} s"),
        ("memory", f"{_megabytes(lab)} MB, all processes"),
        ("API server", lab["api"]),
        ("KUBECONFIG", lab["kubeconfig"]),
        ("kubectl", lab["kubectl"]),
        ("operator", _operator(operator)),
        ("S3 server", _process(store["pid"], f"{store['endpoint']}, bucket {store['bucket']}")),
        ("logs", lab["logs"]),
    ]
    lines = [f"{name:<12}{value}" for name, value in rows]
    return "\n".join([*lines, *_node_table(lab["nodes"])])


def _node_table(nodes: Mapping[str, Any]) -> list[str]:
    """A row per node, followed by its injected faults."""
    lines = ["", f"{'NODE':<10}{'ADDRESS':<14}{'PODS':<6}{'EXPORTER':<10}GPUS"] if nodes else []
    for name, node in nodes.items():
        running = sum(1 for pod in node.get("pods", []) if pod["running"])
        gpus = "  ".join(map(render_gpu, node.get("gpus", [])))
        exporter = node["exporter"] if node["powered"] else "off"
        lines.append(f"{name:<10}{node['ip']:<14}{running:<6}{exporter:<10}{gpus}".rstrip())
        lines += [f"  {fault}" for fault in list_faults(node)]
    return lines


def list_faults(node: Mapping[str, Any]) -> list[str]:
    found = [] if node["connected"] else ["cut off from the API server"]
    return [*found, *node.get("faults", [])] if node["powered"] else ["no power"]


def render_gpu(gpu: Mapping[str, Any]) -> str:
    state = "ok" if gpu["healthy"] else f"XID {gpu['xid']}"
    if not gpu["present"]:
        state = "lost"
    return f"{gpu['index']}: {gpu.get('pod') or 'free'}, {state}"


def _operator(operator: Mapping[str, Any]) -> str:
    ended = operator.get("ended")  # missing if an older version started the lab
    if ended is not None:
        return f"ended with {ended}: see `everstep-lab operator logs`"
    return _process(operator["pid"], operator["metrics"])


def gpu_count(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _process(pid: int | None, where: str) -> str:
    return "stopped" if pid is None else f"pid {pid}, {where}"


def _megabytes(lab: Mapping[str, Any]) -> int:
    return round(int(lab["memory_bytes"]) / 1e6)

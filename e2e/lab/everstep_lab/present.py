"""What people read on the terminal; pure text from what the supervisor describes."""

from collections.abc import Mapping
from typing import Any


def render_up(lab: Mapping[str, Any]) -> str:
    """What is there now, and what to type next."""
    config = lab["config"]
    return "\n".join(
        [
            f"The lab is up after {lab['up_seconds']:.1f} s: {config['nodes']} nodes with "
            f"{config['gpus_per_node']} GPUs each, {_megabytes(lab)} MB of memory in all.",
            "",
            f"  export KUBECONFIG={lab['kubeconfig']}",
            f"  alias kubectl={lab['kubectl']}",
            "  kubectl get nodes",
            "",
            "  everstep-lab status                          what runs",
            "  everstep-lab fault node-2 --gpu 0 --xid 79   break a GPU",
            "  everstep-lab down                            end it",
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
        ("operator", _process(operator["pid"], operator["metrics"])),
        ("S3 server", _process(store["pid"], f"{store['endpoint']}, bucket {store['bucket']}")),
        ("logs", lab["logs"]),
    ]
    lines = [f"{name:<12}{value}" for name, value in rows]
    for name, node in lab["nodes"].items():
        lines += [f"{name:<12}{_flat(node)}"]
    return "\n".join(lines)


def _process(pid: int | None, where: str) -> str:
    return "stopped" if pid is None else f"pid {pid}, {where}"


def _megabytes(lab: Mapping[str, Any]) -> int:
    return round(int(lab["memory_bytes"]) / 1e6)


def _flat(node: Mapping[str, Any]) -> str:
    """`key value, …`, what is empty left out."""
    return ", ".join(f"{k} {_value(v)}" for k, v in node.items() if v not in (None, "", [], {}))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + _flat(value) + ")"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)

"""Renders the description of the kind lab as text for the terminal. Pure."""

from collections.abc import Mapping
from typing import Any

from everstep_lab import present


def render_kind_up(lab: Mapping[str, Any]) -> str:
    """What `up` created, and commands to try next."""
    config = lab["config"]
    return "\n".join(
        [
            f"The kind lab is up after {lab['up_seconds']:.1f} s: cluster {lab['cluster']!r}, "
            f"{config['nodes']} nodes with {present.gpu_count(config['gpus_per_node'])} each.",
            "",
            f"  export KUBECONFIG={lab['kubeconfig']}",
            "  kubectl get nodes",
            "",
            "  everstep-lab status                          show nodes, faults, operator",
            "  everstep-lab fault node-2 --gpu 0 --xid 79   break a GPU",
            "  everstep-lab down                            delete the cluster",
        ]
    )


def render_kind_status(lab: Mapping[str, Any]) -> str:
    operator, store = lab["operator"], lab["objectstore"]
    rows = [
        ("cluster", f"kind, {lab['cluster']}"),
        ("KUBECONFIG", lab["kubeconfig"]),
        ("kubectl", lab["kubectl"]),
        ("operator", _operator(operator)),
        ("S3 server", f"{store['environment']['AWS_ENDPOINT_URL']}, bucket {store['bucket']}"),
    ]
    lines = [f"{name:<12}{value}" for name, value in rows]
    return "\n".join([*lines, *_node_table(lab["nodes"])])


def _operator(operator: Mapping[str, Any]) -> str:
    if "error" in operator:
        return f"unknown: {operator['error']}"
    pods = [f"{pod['name']}{'' if pod['ready'] else ' (not ready)'}" for pod in operator["pods"]]
    return ", ".join(pods) or "not installed"


def _node_table(nodes: Mapping[str, Any]) -> list[str]:
    width = max((len(name) for name in nodes), default=0) + 2
    lines = ["", f"{'NODE':<{width}}{'EXPORTER':<10}GPUS"] if nodes else []
    for name, node in nodes.items():
        gpus = "  ".join(map(present.render_gpu, node.get("gpus", [])))
        exporter = node["exporter"] if node["powered"] else "off"
        lines.append(f"{name:<{width}}{exporter:<10}{gpus}".rstrip())
        lines += [f"  {fault}" for fault in present.list_faults(node)]
    return lines

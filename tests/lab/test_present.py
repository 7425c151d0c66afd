"""What `everstep-lab` prints."""

from typing import Any

import pytest

from everstep_lab import present

METRICS = "http://127.64.0.250:8080/metrics"


def a_node(**changes: Any) -> dict[str, Any]:
    gpu = {"index": 0, "healthy": True, "xid": 0, "present": True, "pod": None}
    return {
        "ip": "127.64.0.1", "powered": True, "connected": True, "exporter": "ok", "faults": [],
        "gpus": [gpu], "pods": [], **changes,
    }  # fmt: skip


def a_lab(operator: dict[str, Any], **nodes: dict[str, Any]) -> dict[str, Any]:
    return {
        "supervisor": 7,
        "up_seconds": 61.2,
        "memory_bytes": 812_000_000,
        "api": "https://127.64.0.254:6443",
        "kubeconfig": "/lab/kubeconfig",
        "kubectl": "/lab/kubectl",
        "logs": "/lab/logs",
        "objectstore": {"pid": 9, "endpoint": "http://127.64.0.253:9000", "bucket": "everstep"},
        "operator": operator,
        "nodes": nodes,
    }


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ({"pid": 8, "ended": None, "metrics": METRICS}, f"operator    pid 8, {METRICS}"),
        ({"pid": None, "ended": None, "metrics": METRICS}, "operator    stopped"),
        (
            {"pid": None, "ended": 3, "metrics": METRICS},
            "operator    ended with 3: see `everstep-lab operator logs`",
        ),
        ({"pid": 8, "metrics": METRICS}, f"operator    pid 8, {METRICS}"),
    ],
    ids=["runs", "stopped", "ended by itself", "a lab of an older version"],
)
def test_the_status_says_how_the_operator_is(operator: dict[str, Any], line: str) -> None:
    assert line in present.render_status(a_lab(operator)).splitlines()


@pytest.mark.parametrize(
    ("node", "lines"),
    [
        (a_node(), ["n         127.64.0.1    0     ok        0: free, ok"]),
        (
            a_node(connected=False),
            [
                "n         127.64.0.1    0     ok        0: free, ok",
                "  cut off from the API server",
            ],
        ),
        (
            a_node(powered=False, connected=False, faults=["GPU 0, XID 64"]),
            ["n         127.64.0.1    0     off       0: free, ok", "  no power"],
        ),
    ],
    ids=["well", "cut off", "without power"],
)
def test_the_status_says_what_is_broken_on_a_node(node: dict[str, Any], lines: list[str]) -> None:
    running = {"pid": 8, "ended": None, "metrics": METRICS}
    shown = present.render_status(a_lab(running, n=node)).splitlines()
    assert shown[-len(lines) :] == lines

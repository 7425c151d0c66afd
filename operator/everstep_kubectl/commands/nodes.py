"""`nodes`, `why NODE`, `release NODE`."""

import argparse
import time
from urllib.parse import quote

from everstep_kubectl.cluster import QUARANTINES, Cluster, NotFound
from everstep_kubectl.commands.showing import show


def run(arguments: argparse.Namespace, cluster: Cluster) -> int:
    reading = cluster.begin("get", f"nodes,{QUARANTINES}", "-o", "json")
    from everstep_kubectl import nodes

    found = nodes.choose_shown(nodes.build_nodes(reading.items()))
    now = time.time()  # noqa: TID251 ages are shown as of now
    show(arguments, found, lambda: nodes.render_table(found, now))
    return 0


def why(arguments: argparse.Namespace, cluster: Cluster) -> int:
    reading = cluster.begin("get", f"nodes,{QUARANTINES}", "-o", "json")
    field = f"involvedObject.name={arguments.node}"
    about = cluster.begin("get", "events", "-A", f"--field-selector={field}", "-o", "json")
    from everstep_kubectl import nodes

    node = next((n for n in nodes.build_nodes(reading.items()) if n.name == arguments.node), None)
    if node is None:
        raise NotFound(f"there is no node {arguments.node!r}: kubectl everstep nodes lists them")
    events = nodes.choose_events(about.items(), arguments.node)
    now = time.time()  # noqa: TID251 ages are shown as of now
    value = {"node": node, "events": events}
    show(arguments, value, lambda: nodes.render_why(node, events, now))
    return 0


def release(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Return 1 if the cordon or taint was still there when the time was over."""
    listed = cluster.begin("get", QUARANTINES, "-o", "json").items()
    mine = [q for q in listed if q["spec"]["nodeName"] == arguments.node]
    if not mine:
        raise NotFound(
            f"node {arguments.node} is in no quarantine of Everstep: there is nothing to release. "
            f"For its state: kubectl everstep why {arguments.node}"
        )
    for quarantine in mine:
        print(f"releasing {arguments.node}: {quarantine['spec']['message']}")
        cluster.begin("delete", QUARANTINES, quarantine["metadata"]["name"], "--wait=false").text()
    from everstep_kubectl import text

    if _until_free(arguments, cluster):
        print(
            f"{arguments.node} is released: Everstep's cordon and taint are gone, and the same evidence will not "
            "quarantine it again"
        )
        return 0
    print(
        f"{arguments.node} still has Everstep's cordon or taint after {arguments.timeout:.0f} s. The operator removes "
        f"them: see whether it runs ({text.SHOW_OPERATOR})"
    )
    return 1


def _until_free(arguments: argparse.Namespace, cluster: Cluster) -> bool:
    from everstep_kubectl import nodes

    path = f"/api/v1/nodes?fieldSelector={quote(f'metadata.name={arguments.node}')}"
    exists = cluster.begin("get", "node", arguments.node, "--ignore-not-found", "-o", "name").text()
    if not exists.strip():
        return True
    changes = cluster.watch(path, arguments.timeout)
    return any(kind == "DELETED" or not nodes.is_marked(node) for kind, node in changes)

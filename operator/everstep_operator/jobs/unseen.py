"""A second check before a loss is counted.

The watches are independent streams: the pod watch may name a node before the node watch does, and a
list may be older than the status that was read with it. A watch may also have stopped for a minute
without an error. So whatever is missing in a mirror, and each node that has not been Ready for long,
is read by name from the API server before its loss is recorded.
"""

import math

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.jobs import observe
from everstep_operator.jobs.observed import Observed
from everstep_operator.kube import Kube
from everstep_operator.world import Object, World

READ_NODES = 16
"""How many nodes that are not Ready are read at most."""


async def find_unseen(port: Kube, world: World, observed: Observed) -> bool:
    """Whether a pod or node that the plan considers lost exists after all, or a node is Ready; it is
    then in the mirrors.

    Call it without an `await` after the observation: the mirrors then still hold what the plan has
    seen. A pod or node that a watch adds during the requests also counts as found.
    """
    pods = {name: world.pods.get(name, observed.job.namespace) for name in _missing_pods(observed)}
    nodes = {pod.node for pod in observed.pods if pod.node} - observed.nodes.keys()
    away = {name: world.nodes.get(name) for name in _lost_nodes(observed)}
    for name, uid in _missing_pods(observed).items():
        await _look_for_pod(port, world, name, observed.job.namespace, uid)
    for name in sorted(nodes | away.keys()):
        await _look_for_node(port, world, name)
    found = [world.pods.get(n, observed.job.namespace) is not held for n, held in pods.items()]
    back = [_readiness(world.nodes.get(name)) != _readiness(held) for name, held in away.items()]
    return any(found) or any(back) or any(world.nodes.get(name) for name in nodes)


def _missing_pods(observed: Observed) -> dict[str, str]:
    """Name → UID of the pods that status records and that are in no mirror."""
    job = observed.job
    return {
        names.pod_name(job.name, record.slot, record.attempt): record.pod_uid
        for record in job.status.slots
        if record.pod_uid is not None and observed.pod_of(record.slot, record.attempt) is None
    }


def _lost_nodes(observed: Observed) -> list[str]:
    """Nodes of the job's present pods that have not been Ready for `recovery.nodeLostSeconds`: only the
    first ones, because a watch that has stopped misses them all.
    """
    spec = observed.job.spec
    held = {pod.node for pod in observed.current_pods} & observed.nodes.keys()
    lost = ((name, observed.lost_for(observed.nodes[name])) for name in sorted(held))
    limit = spec.recovery.node_lost_seconds if spec is not None else math.inf
    return [name for name, seconds in lost if seconds is not None and seconds >= limit][:READ_NODES]


def _readiness(node: Object | None) -> tuple[str, str] | None:
    """Why the node is not Ready, and since when according to its object."""
    if node is None:
        return None
    return observe.describe_not_ready(node), observe.find_transition(node)


async def _look_for_pod(port: Kube, world: World, name: str, namespace: str, uid: str) -> None:
    try:
        pod = await port.get(kube.PODS, name, namespace)
    except kube.Gone:
        return
    if pod["metadata"]["uid"] == uid:
        world.pods.put(pod)


async def _look_for_node(port: Kube, world: World, name: str) -> None:
    """List by name, because the operator may list nodes, but not get them."""
    items, _ = await port.list(kube.NODES, fields=f"metadata.name={name}")
    for item in items:
        world.nodes.put(item)

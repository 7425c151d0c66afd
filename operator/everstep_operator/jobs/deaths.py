"""Reports the ends of containers and ranks to `health`, each once. Pure, except that it remembers
what it has reported.

The memory does not grow with the age of a job: an entry for a pod is kept only while the pod exists
(no other pod will have its UID), and of the job's incidents only the newest are kept. An end that
is reported twice costs one more scrape of its node.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from everstep_operator.jobs.observed import Observed

DEATHS = ("Worker", "Agent", "Device", "Process")
"""Prefixes of the causes of incidents in which a process of a slot died or got stuck."""
REMEMBERED = 256
"""Limit of remembered incidents; more than a job's report ever contains."""


@dataclass(slots=True)
class ToldDeaths:
    _of_pods: frozenset[str] = frozenset()
    _of_incidents: Mapping[str, str] | None = None
    """None before the first observation: deaths that it shows are not new."""

    def take_new(self, observed: Observed) -> list[str]:
        """Nodes on which something has died since the last call; one entry for each death."""
        pods, incidents = dict(_list_ended(observed)), dict(_list_incidents(observed))
        known = self._of_incidents
        found = {**pods, **incidents}
        new = (
            [] if known is None else [i for i in found if i not in self._of_pods and i not in known]
        )
        remembered = {**(known or {}), **incidents}
        self._of_pods = frozenset(pods)
        self._of_incidents = dict(list(remembered.items())[-REMEMBERED:])
        return [found[identity] for identity in new if found[identity]]


def _list_ended(observed: Observed) -> Iterator[tuple[str, str]]:
    """(identity, node) of each known end of a container; node "" for a planned one."""
    for pod in observed.pods:
        if pod.restarts or pod.ended:
            in_order = pod.deleting or (pod.ended is not None and pod.ended.exit_code == 0)
            yield f"{pod.uid}/{pod.restarts}/{pod.ended is not None}", "" if in_order else pod.node


def _list_incidents(observed: Observed) -> Iterator[tuple[str, str]]:
    nodes = {p.slot: p.node for p in observed.pods}
    for incident in observed.seen.incidents if observed.seen else ():
        if incident.slot is not None and incident.cause.startswith(DEATHS):
            yield incident.id, nodes.get(incident.slot, "")

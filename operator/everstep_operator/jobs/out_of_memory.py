"""The Event for containers that used more memory than their limit. Pure, except that it remembers
the ends that it has seen.
"""

from dataclasses import dataclass

from everstep_operator.jobs.observed import Observed, Pod
from everstep_operator.values import EventDraft

REASON = "OOMKilled"
"""The kubelet's reason for such an end."""


@dataclass(slots=True)
class ToldOutOfMemory:
    _known: frozenset[str] | None = None
    """None before the first observation: ends that it shows are not new."""

    def take_new(self, observed: Observed) -> EventDraft | None:
        """The Event about all ends since the last call; None: there were none."""
        found = {_identify(pod): pod for pod in observed.pods if _is_out_of_memory(pod)}
        known, self._known = self._known, frozenset(found)
        new = [] if known is None else sorted(found.keys() - known)
        return _build_event([found[end] for end in new], ",".join(new)) if new else None


def _is_out_of_memory(pod: Pod) -> bool:
    newest = pod.ended or pod.last_ended
    return newest is not None and newest.reason == REASON


def _identify(pod: Pod) -> str:
    """An id of the newest end, which stays the same when the kubelet restarts the container."""
    return f"{pod.uid}/{pod.restarts + (pod.ended is not None)}"


def _build_event(pods: list[Pod], stamp: str) -> EventDraft:
    named = ", ".join(pod.name for pod in pods)
    message = (
        f"{named}: the container took more memory than its limit, and the kernel ended it. It starts again in its pod "
        "and adopts the saves that it held in memory. If this repeats: raise resources.limits.memory of the container, "
        "or use less memory in the script"
    )
    return EventDraft(reason=REASON, message=message, warning=True, stamp=stamp)

"""Values that `health`, `fleet` and `jobs` exchange. Nothing else passes between them.

`health` publishes one verdict per node in question; `jobs` reads the mapping node → verdict and
never asks why.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


class NodeState(enum.Enum):
    LEAVING = "leaving"
    """The node must be left, and what runs on it can still be asked to save: save, then drain."""
    GONE = "gone"
    """What runs on the node cannot be asked any more: replace at once."""
    SUSPECT = "suspect"
    """Something is wrong and the proof is still to come: nobody is moved, nothing new is started there."""
    UNKNOWN = "unknown"
    """We cannot see (an exporter that is silent): reported, and no reason to act."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """What `health` and `fleet` hold of one node."""

    node: str
    state: NodeState
    reason: str
    """One CamelCase word, the same in conditions, Events and metrics."""
    message: str
    """A sentence with the evidence in it."""
    incident: str = ""
    """Identity of the node's incident; it runs through every Event, log line and phase."""
    quarantined: bool = False
    """The node is (to be) marked by us. False with state leaving: the budget is spent, jobs leave it all the same."""
    marks: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """When (seconds since the Unix epoch, this operator's clock) the incident reached `signal`, `verdict`, `cordon`."""
    evidence: tuple[str, ...] = ()
    """Identities of the evidence."""
    gone_pods: frozenset[str] = frozenset()
    """With state gone: "namespace/name" of the pods that held the GPUs that are gone; empty: not known, so all."""

    def state_of(self, namespace: str, pod: str) -> NodeState:
        """A neighbour on a sound GPU of a node that is gone can still be asked."""
        if self.state is NodeState.GONE and self.gone_pods:
            return NodeState.GONE if f"{namespace}/{pod}" in self.gone_pods else NodeState.LEAVING
        return self.state

    @property
    def avoided(self) -> bool:
        """Whether new pods must not be placed there."""
        return self.state is not NodeState.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An Event to be: reason and message are those of the condition or verdict that it announces."""

    reason: str
    message: str
    warning: bool = False
    incident: str = ""
    stamp: str = ""
    """Tells two happenings with the same words apart; a repeated one is written once."""

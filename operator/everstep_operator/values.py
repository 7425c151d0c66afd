"""Values that `health`, `fleet` and `jobs` exchange. Nothing else passes between them.

`health` publishes one verdict per node concerned; `jobs` reads the mapping node → verdict and
needs no reasons.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


class NodeState(enum.Enum):
    LEAVING = "leaving"
    """Jobs must leave the node, and pods on it can still save: save, then drain."""
    GONE = "gone"
    """Pods on the node no longer respond: replace them at once."""
    SUSPECT = "suspect"
    """A fault is not proven yet: no pod is moved, and nothing new is started there."""
    UNKNOWN = "unknown"
    """The node cannot be observed (a silent exporter): this is reported and leads to no action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GonePods:
    """Which pods ("namespace/name") of a node lost a GPU, and so no longer respond."""

    holders: tuple[str, ...] = ()
    """They held the lost GPUs. Empty: unknown, so every pod but `spared` counts."""
    spared: tuple[str, ...] = ()
    """They hold a working GPU: if the holders are unknown, these are asked to save first."""

    def includes(self, pod: str) -> bool:
        return pod in self.holders if self.holders else pod not in self.spared


ALL_PODS = GonePods()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """The verdict of `health` and `fleet` on one node."""

    node: str
    state: NodeState
    reason: str
    """One CamelCase word, the same in conditions, Events and metrics."""
    message: str
    """A sentence with the evidence."""
    incident: str = ""
    """Id of the node's incident, in every Event, log line and phase."""
    quarantined: bool = False
    """The node is (to be) marked by Everstep. False with state leaving: observe-only mode."""
    over_budget: bool = False
    """The evidence would convict, but the cordon budget is spent: so the state is suspect."""
    marks: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """When the incident reached `signal`, `verdict`, `cordon` (seconds since the Unix epoch, this
    operator's clock).
    """
    evidence: tuple[str, ...] = ()
    """Ids of the evidence."""
    gone_pods: GonePods = ALL_PODS
    """With state gone: the pods that no longer respond."""

    def state_of(self, namespace: str, pod: str) -> NodeState:
        """The state for one pod. A pod with a working GPU can still save on a node that is GONE."""
        if self.state is NodeState.GONE and not self.gone_pods.includes(f"{namespace}/{pod}"):
            return NodeState.LEAVING
        return self.state

    @property
    def avoided(self) -> bool:
        """Whether new pods must not be scheduled there."""
        return self.state is not NodeState.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """An Event to create: reason and message are those of the condition or verdict that it
    announces.
    """

    reason: str
    message: str
    warning: bool = False
    incident: str = ""
    stamp: str = ""
    """Distinguishes two Events with the same text; a repeated one is written once."""

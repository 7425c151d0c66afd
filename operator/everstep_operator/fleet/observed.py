"""The input of a fleet pass: values only."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from everstep_operator.evidence import Finding
from everstep_operator.fleet.budget import TENTH, Budget
from everstep_operator.nodes import NodeFacts
from everstep_operator.quarantines import Quarantine
from everstep_operator.roster import Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    budget: Budget = TENTH
    observe_only: bool = False
    """Verdicts are only reported; no node is changed."""
    many_lost: int = 3
    """If more objects than this vanish at once without a watch event, they count as lost."""
    settle_seconds: float = 1.0
    """How long an object must be absent before it is handled."""
    loss_seconds: float = 10.0
    """How long to wait for the watch events of many vanished objects."""
    repair_seconds: float = 30.0
    """Minimum time between two repairs of a node's mark, so that Everstep does not fight with
    another controller.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The CRD of NodeQuarantine. It is read only when an object is absent."""

    creatable: bool = True
    """Whether a NodeQuarantine could be created now. While a CRD is being deleted, none can."""
    created_at: float | None = None
    """Seconds since the Unix epoch; None: unknown. An absent object that was created earlier
    vanished with a former definition.
    """


SERVED = Definition()


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    by_node: Mapping[str, Finding] = field(default_factory=dict)
    """For look-ups."""
    telling: Collection[str] = ()
    """Nodes with a finding: few among many healthy ones."""
    unlisted: Collection[str] = ()
    """Nodes that show GPUs which their annotation does not list yet."""

    def of(self, node: str) -> Finding:
        return self.by_node.get(node) or Finding(node=node)


NOTHING_FOUND = Findings()


def tells(finding: Finding) -> bool:
    return bool(finding.claims or finding.doubt or finding.silent)


def shows_more(finding: Finding, facts: NodeFacts) -> bool:
    return not finding.present <= set(facts.expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    roster: Roster
    quarantines: tuple[Quarantine, ...] | None
    """None: they could not be listed; `unreadable` says why."""
    unreadable: str = ""
    known: bool = True
    """They have been listed by this process, or their kind does not exist: jobs get verdicts."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """NodeQuarantines that exist but cannot be read, because a person has edited them → their node."""
    definition: Definition = SERVED
    findings: Findings = NOTHING_FOUND

    @property
    def nodes(self) -> Mapping[str, NodeFacts]:
        return self.roster.nodes

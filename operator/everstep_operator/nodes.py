"""A Node object as the input of `health` and `fleet`, and Everstep's own annotations on it.

There are three: the mark (why the node was cordoned, and whether the cordon is Everstep's), the
answered evidence, and the GPUs that the node should have. An unreadable annotation counts as
absent.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from everstep_contract import codec, names
from everstep_operator.evidence import Evidence
from everstep_operator.values import ALL_PODS, GonePods, NodeState

Object = Mapping[str, Any]
T = TypeVar("T")
GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Content of the annotation `cordoned-by` on a quarantined node."""

    quarantine: str
    """Name of the NodeQuarantine."""
    incident: str
    cordoned: bool
    """Everstep made the node unschedulable; False: it already was."""
    at: float
    verdict: str = NodeState.LEAVING.value
    reason: str = ""
    message: str = ""
    decided_at: float = 0.0
    evidence: tuple[Evidence, ...] = ()
    gone_pods: GonePods = ALL_PODS
    machine: str = ""
    """The machine that was marked; "" in marks of older versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGpus:
    machine: str
    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    name: str
    uid: str
    version: str
    """resourceVersion that was read."""
    machine: str
    """The hardware's UUID. A machine that is installed anew keeps it, and its faults."""
    machine_id: str = ""
    """Content of /etc/machine-id, by which earlier versions of Everstep named the machine."""
    boot: str
    gpus: int = 0
    """Capacity."""
    allocatable: int = 0
    unschedulable: bool = False
    taints: tuple[Object, ...] = ()
    mark: Mark | None = None
    stale: Mark | None = None
    """The mark of another machine, which had this Node object before."""
    answered: tuple[Evidence, ...] = ()
    expected: tuple[str, ...] = ()
    """UUIDs that this machine should have; another machine's are not used."""

    def is_machine(self, named: str) -> bool:
        """Whether this is the machine that was recorded under this name; "": any."""
        return named in ("", self.machine) or named == self.machine_id

    @property
    def tainted(self) -> bool:
        """Whether the node has Everstep's taint."""
        return any(taint.get("key") == names.TAINT_QUARANTINE for taint in self.taints)

    @property
    def has_gpus(self) -> bool:
        return self.gpus > 0 or bool(self.expected)


def to_facts(node: Object) -> NodeFacts:
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    annotations = metadata.get("annotations") or {}
    system = status.get("nodeInfo") or {}
    machine_id = str(system.get("machineID") or "")
    machine = system.get("systemUUID") or machine_id or str(metadata.get("uid", ""))
    expected = _read(ExpectedGpus, annotations.get(names.ANNOTATION_EXPECTED_GPUS))
    answered = _read(Answered, annotations.get(names.ANNOTATION_ANSWERED))
    mark = _read(Mark, annotations.get(names.ANNOTATION_CORDONED))
    facts = NodeFacts(
        name=metadata["name"],
        uid=str(metadata.get("uid", "")),
        version=str(metadata.get("resourceVersion", "")),
        machine=machine,
        machine_id=machine_id,
        boot=str(system.get("bootID", "")),
        gpus=_count(status.get("capacity")),
        allocatable=_count(status.get("allocatable")),
        unschedulable=bool(spec.get("unschedulable", False)),
        taints=tuple(spec.get("taints") or ()),
    )
    ours = mark is not None and facts.is_machine(mark.machine)
    own = expected is not None and bool(expected.machine) and facts.is_machine(expected.machine)
    return replace(
        facts,
        mark=replace(mark, evidence=rename(mark.evidence, facts)) if mark and ours else None,
        stale=None if ours else mark,
        answered=rename(answered.evidence, facts) if answered else (),
        expected=expected.uuids if expected and own else (),
    )


def rename(evidence: Iterable[Evidence], node: NodeFacts) -> tuple[Evidence, ...]:
    """The evidence, with the present name of the machine where an earlier version recorded another."""
    return tuple(
        replace(one, machine=node.machine)
        if one.machine and one.machine == node.machine_id
        else one
        for one in evidence
    )


def choose_expected(expected: Collection[str], present: Collection[str]) -> set[str]:
    """The GPUs that a node should have after a page that shows these. A GPU that was never seen
    before replaces one that is absent: it was swapped.
    """
    new = set(present) - set(expected)
    absent = sorted(set(expected) - set(present))
    return {*present, *absent[len(new) :]}


def write(value: Mark | ExpectedGpus | Answered) -> str:
    """The annotation's text."""
    return codec.dumps(value).decode()


def _read(cls: type[T], text: str | None) -> T | None:
    if not text:
        return None
    try:
        return codec.loads(cls, text)
    except codec.DecodeError:
        return None


def _count(resources: Object | None) -> int:
    """GPUs of a node, including MIG slices (`nvidia.com/mig-…`)."""
    total = 0
    for name, quantity in (resources or {}).items():
        if (name == GPU_RESOURCE or name.startswith("nvidia.com/mig-")) and str(quantity).isdigit():
            total += int(quantity)
    return total

"""One fault, one timeline: merges the entries of `status.incidents` that one quarantine explains,
or that have the same id. Pure.

A fault may interrupt training twice: a GPU fails and its rank dies, so the others continue in
place; seconds later the verdict on the node moves the slot. The costs of both interruptions are
added up. An operator of version 0.1 wrote one entry for each slot that an incident moved. If
several entries have the same mark, the earliest counts for what was found and decided (`FIRST`),
and the latest for what had to be done.

The cost is the time in which no rank takes a step. The job measures it as the sum of the incident's
phases, without those in which steps continue (`STEPPING`). If no process of the job lived to
measure all of it, the operator's marks are used instead: from `left` to `running`, or from the
beginning to `running` if a slot did not leave in order. This time multiplied by the job's GPUs is
the cost in GPU-seconds. Lost steps come on top, because taking them again costs their time again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep_kubectl import devices
from everstep_kubectl.text import seconds_of

Raw = Mapping[str, Any]
FIRST = frozenset({"signal", "verdict", "cordon", "leave"})
STEPPING = frozenset({"boundary", "drain"})
"""Phases in which the ranks still step."""
WHOLE = frozenset({"restart", "regroup", "first_step", "step"})
"""Phases that are measured only if the job has seen the end of the incident."""
UNFINISHED = "no end was recorded"
MEANING = {
    "signal": "the evidence shows",
    "verdict": "decided: the node is not to be used",
    "cordon": "node cordoned and tainted",
    "leave": "job asked to save and leave",
    "commit": "checkpoint committed",
    "left": "slot has left, its state is safe",
    "deleted": "old pod deleted",
    "created": "new pod made",
    "resumed": "the other members step again",
    "running": "all members step again",
    "withdrawn": "no slot has to leave any more",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    kind: str
    code: int
    gpu: str
    first_seen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    name: str
    seconds: float
    """Since the incident began, on the operator's clock."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    seconds: float
    """How long it took, on the job's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    seconds: float | None
    """Seconds in which no rank took a step; None: not measured (yet)."""
    gpus: int
    gpu_seconds: float | None
    steps_lost: int | None
    """Steps that had to be taken again; None: not reported."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    id: str
    """Id of its first interruption."""
    ids: tuple[str, ...]
    """Ids of all its interruptions."""
    cause: str
    message: str
    started_at: str
    open: bool
    nodes: tuple[str, ...]
    slots: tuple[int, ...]
    verdict: str
    """Verdict of the quarantine; empty: there is none (any more)."""
    evidence: tuple[Evidence, ...]
    rung: str
    checkpoint_step: int | None
    """Step from which the job continued."""
    moments: tuple[Moment, ...]
    phases: tuple[Phase, ...]
    cost: Cost

    @property
    def started(self) -> float:
        return seconds_of(self.started_at) or 0.0


def build_incidents(job: Raw, quarantines: Iterable[Raw] = ()) -> tuple[Incident, ...]:
    """The incidents that status still lists, oldest first."""
    status = job.get("status") or {}
    faults: dict[str, list[Raw]] = {}
    for entry in status.get("incidents") or ():
        faults.setdefault(str(entry.get("quarantine") or entry["id"]), []).append(entry)
    gpus = count_gpus(job)
    found = [_build(entries, list(quarantines), gpus) for entries in faults.values()]
    return tuple(sorted(found, key=lambda i: i.started))


def count_gpus(job: Raw) -> int:
    """GPUs of all pods of the job together; for a job without GPUs, the number of its pods."""
    workers = (job.get("spec") or {}).get("workers") or {}
    containers = ((workers.get("template") or {}).get("spec") or {}).get("containers") or ()
    each = 0
    for container in containers:
        each += devices.count_gpus((container.get("resources") or {}).get("limits") or {})
    return int(workers.get("replicas") or 1) * (each or 1)


def _build(entries: Sequence[Raw], quarantines: Sequence[Raw], gpus: int) -> Incident:
    first = min(entries, key=lambda e: str(e.get("startedAt") or ""))
    spec = _quarantine_of(entries, quarantines)
    marks = _marks(entries)
    interruptions = _list_interruptions(entries)
    open_ = any(e.get("open", True) for e in entries)
    seconds, source = (None, UNFINISHED) if open_ else _count_stopped(interruptions)
    return Incident(
        id=str(first["id"]),
        ids=tuple(str(each[0]["id"]) for each in interruptions),
        cause=str(first.get("cause") or ""),
        message=str(first.get("message") or spec.get("message") or ""),
        started_at=str(first.get("startedAt") or ""),
        open=open_,
        nodes=tuple(sorted({str(e["node"]) for e in entries if e.get("node")})),
        slots=tuple(sorted({slot for e in entries for slot in _slots(e)})),
        verdict=str(spec.get("verdict") or ""),
        evidence=tuple(build_evidence(e) for e in spec.get("evidence") or ()),
        rung=next((str(e["rung"]) for e in entries if e.get("rung")), _usual_rung(marks)),
        checkpoint_step=_most(entries, "resumedStep"),
        moments=tuple(
            Moment(name=n, seconds=s, meaning=MEANING.get(n, ""))
            for n, s in sorted(marks.items(), key=lambda m: m[1])
        ),
        phases=tuple(phase for each in interruptions for phase in _longest(each)),
        cost=Cost(
            seconds=seconds,
            gpus=gpus,
            gpu_seconds=None if seconds is None else round(seconds * gpus, 1),
            steps_lost=_count_lost(interruptions),
            source=source,
        ),
    )


def _list_interruptions(entries: Sequence[Raw]) -> list[list[Raw]]:
    """The entries of one fault by id, in the order in which they began."""
    by_id: dict[str, list[Raw]] = {}
    for entry in sorted(entries, key=lambda e: str(e.get("startedAt") or "")):
        by_id.setdefault(str(entry["id"]), []).append(entry)
    return list(by_id.values())


def _longest(entries: Sequence[Raw]) -> tuple[Phase, ...]:
    return max((_phases(e) for e in entries), key=len)


def _count_stopped(interruptions: Sequence[Sequence[Raw]]) -> tuple[float | None, str]:
    """Seconds in which no rank took a step, over all interruptions, and who measured them."""
    stopped = [e for e in interruptions if not _is_plain_move(e)]
    found = [_stopped(_marks(e), _longest(e), _all_left(e)) for e in stopped]
    seconds = [s for s, _ in found if s is not None]
    sources = " and ".join(dict.fromkeys(source for _, source in found))
    return (round(sum(seconds), 3), sources) if len(seconds) == len(found) else (None, sources)


def _is_plain_move(entries: Sequence[Raw]) -> bool:
    """Whether the job had already continued without the slot when the slot moved, or no slot moved in
    the end. Only the operator reports such a move.
    """
    return all(not e.get("phases") and (e.get("rung") or _is_withdrawn(e)) for e in entries)


def _is_withdrawn(entry: Raw) -> bool:
    return any(mark["name"] == "withdrawn" for mark in entry.get("marks") or ())


def _count_lost(interruptions: Sequence[Sequence[Raw]]) -> int | None:
    lost = [n for e in interruptions if (n := _most(e, "stepsLost")) is not None]
    return sum(lost) if lost else None


def _slots(entry: Raw) -> list[int]:
    moved = [int(m["slot"]) for m in entry.get("slots") or ()]
    return moved or ([int(entry["slot"])] if entry.get("slot") is not None else [])


def _quarantine_of(entries: Sequence[Raw], quarantines: Sequence[Raw]) -> Raw:
    ids = {e.get(key) for e in entries for key in ("id", "quarantine", "jobId")} - {None}
    specs = [q.get("spec") or {} for q in quarantines]
    return next((s for s in specs if s.get("incident") in ids), {})


def build_evidence(raw: Raw) -> Evidence:
    return Evidence(
        kind=str(raw.get("kind") or ""),
        code=int(raw.get("code") or 0),
        gpu=str(raw.get("gpu") or ""),
        first_seen=str(raw.get("firstSeen") or ""),
    )


def _marks(entries: Sequence[Raw]) -> dict[str, float]:
    """The marks of all entries, in seconds since the earliest entry began: the entries of one
    incident may begin at different times.
    """
    began = min((seconds_of(e.get("startedAt")) or 0.0 for e in entries), default=0.0)
    marks: dict[str, float] = {}
    for entry in entries:
        shift = max(0.0, (seconds_of(entry.get("startedAt")) or began) - began)
        for mark in entry.get("marks") or ():
            name, at = str(mark["name"]), round(float(mark["seconds"]) + shift, 3)
            choose = min if name in FIRST else max
            marks[name] = choose(marks.get(name, at), at)
    return marks


def _all_left(entries: Sequence[Raw]) -> bool:
    """Whether every slot left in order. Then steps continued until the last one had left; otherwise
    they ended when the incident began.
    """
    return all(any(m["name"] == "left" for m in e.get("marks") or ()) for e in entries)


def _phases(entry: Raw) -> tuple[Phase, ...]:
    raw = entry.get("phases") or ()
    return tuple(Phase(name=str(p["name"]), seconds=float(p["ms"]) / 1000) for p in raw)


def _usual_rung(marks: Mapping[str, float]) -> str:
    return "move" if "created" in marks else ""


def _most(entries: Sequence[Raw], key: str) -> int | None:
    return max((int(e[key]) for e in entries if e.get(key) is not None), default=None)


def _stopped(
    marks: Mapping[str, float], phases: Sequence[Phase], all_left: bool
) -> tuple[float | None, str]:
    if any(p.name in WHOLE for p in phases):
        total = sum(p.seconds for p in phases if p.name not in STEPPING)
        return round(total, 3), "measured by the job"
    if "running" in marks:
        since = marks["left"] if all_left else 0.0
        stepped = marks.get("resumed", marks["running"])
        return round(max(0.0, stepped - since), 3), "seen by the operator"
    return None, "not measured"


def choose(incidents: Sequence[Incident], wanted: str | None) -> Sequence[Incident]:
    """All incidents, the last one, or the one whose id begins with `wanted`. Raises LookupError,
    which names the known ids.
    """
    if wanted is None:
        return incidents
    found = incidents[-1:] if wanted == "last" else [i for i in incidents if wanted in i.ids]
    found = found or [i for i in incidents if any(id.startswith(wanted) for id in i.ids)]
    if len(found) == 1:
        return found
    known = ", ".join(i.id for i in incidents) or "none"
    raise LookupError(f"{wanted!r} names {len(found)} incidents; status knows: {known}")

"""What a job's status means: state, step, age of the last checkpoint. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep_contract.units import Mesh
from everstep_kubectl import incidents, text

Raw = Mapping[str, Any]
NEW, UNSEEN = "New", "no operator has looked at it yet"
"""State and message of a job without a status."""
DELETING = "Deleting"
DELETED = (
    "it is being deleted: the operator does nothing more for it, and its run stays in the store"
)
"""State and message of a job that still exists because of its pods (`--cascade=foreground`) or of somebody's
finalizer. The operator writes no status any more, so the last one may say that it runs.
"""
STALE_SECONDS = 60.0
"""The figures of a running job are written every 10 s if they have changed. Older figures mean a long
step, or that the operator is not running.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    slot: int
    attempt: int
    pod: str
    """Empty: this attempt has no pod (yet)."""
    node: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The cost of all interruptions that were recovered by one rung."""

    rung: str
    count: int
    seconds: float
    """Seconds in which no rank took a step, in total."""
    steps_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    namespace: str
    name: str
    state: str
    message: str
    ready: str
    mesh: str
    """How its ranks form units; empty: each holds the whole model."""
    epoch: int | None
    step: int | None
    until: int | None
    loss: float | None
    checkpoint_step: int | None
    checkpoint_at: str
    checkpoint_bytes: int
    checkpoint_problem: str
    """Empty: checkpoints are healthy."""
    kept_step: int | None
    """Newest step that the pods keep in memory."""
    unsaved: int | None
    """Steps that would be taken again if all pods of the job were lost at once."""
    interruptions: int
    by_cause: dict[str, int]
    steps_lost: int
    """Since the job was created. If the operator is older: only for the incidents that status still
    lists.
    """
    recoveries: tuple[Recovery, ...]
    """The rung with the most seconds first."""
    goodput: str
    seconds: dict[str, float]
    """Of all workers, by what they were spent on."""
    spare_seconds: int | None
    """Seconds for which spares have held a node; None: there was no spare."""
    run: str
    observed_at: str
    warnings: tuple[str, ...]
    slots: tuple[Slot, ...]
    incidents: tuple[incidents.Incident, ...]


def build_job(raw: Raw, now: float) -> Job:
    meta, status = raw["metadata"], raw.get("status") or {}
    checkpoint = status.get("checkpoint") or {}
    restarts = status.get("restarts") or {}
    found, recoveries = incidents.build_incidents(raw), _build_recoveries(status)
    return Job(
        namespace=str(meta["namespace"]),
        name=str(meta["name"]),
        state=_state(raw)[0],
        message=_state(raw)[1],
        ready=str((status.get("world") or {}).get("summary") or ""),
        mesh=_describe_mesh(raw),
        epoch=status.get("epoch"),
        step=status.get("step"),
        until=status.get("until"),
        loss=status.get("loss"),
        checkpoint_step=checkpoint.get("step"),
        checkpoint_at=str(checkpoint.get("committedAt") or ""),
        checkpoint_bytes=int(checkpoint.get("bytes") or 0),
        checkpoint_problem=_problem(status),
        kept_step=status.get("keptStep"),
        unsaved=_unsaved(status, checkpoint),
        interruptions=int(restarts.get("total") or 0),
        by_cause=dict(restarts.get("byCause") or {}),
        steps_lost=_count_lost(recoveries, found),
        recoveries=recoveries,
        goodput=str(status.get("goodput") or ""),
        seconds=dict(status.get("seconds") or {}),
        spare_seconds=status.get("spareSeconds"),
        run=str(status.get("run") or ""),
        observed_at=str(status.get("observedAt") or ""),
        warnings=tuple(_warnings(raw, now)),
        slots=tuple(
            _slot(meta["name"], s) for s in status.get("slots") or () if not _is_given_up(s)
        ),
        incidents=found,
    )


def describe_state(raw: Raw) -> str:
    """State and message, for a line of a command that waits."""
    return ": ".join(_state(raw))


def _state(raw: Raw) -> tuple[str, str]:
    if is_deleted(raw):
        return DELETING, DELETED
    status = raw.get("status") or {}
    return str(status.get("state") or NEW), str(status.get("message") or UNSEEN)


def is_deleted(raw: Raw) -> bool:
    return "deletionTimestamp" in raw["metadata"]


def _describe_mesh(raw: Raw) -> str:
    found = (raw.get("spec") or {}).get("parallelism") or {}
    mesh = Mesh(shard=int(found.get("shard") or 1), tensor=int(found.get("tensor") or 1))
    return f"units of {mesh.unit} ranks ({mesh})" if mesh.unit > 1 else ""


def _build_recoveries(status: Raw) -> tuple[Recovery, ...]:
    found = [
        Recovery(
            rung=str(raw["rung"]),
            count=int(raw.get("count") or 0),
            seconds=float(raw.get("seconds") or 0.0),
            steps_lost=int(raw.get("stepsLost") or 0),
        )
        for raw in status.get("recoveries") or ()
    ]
    return tuple(sorted(found, key=lambda r: -r.seconds))


def _count_lost(recoveries: Sequence[Recovery], found: Sequence[incidents.Incident]) -> int:
    """The larger of two counts: the totals do not include an incident that is still open."""
    known = sum(i.cost.steps_lost or 0 for i in found)
    return max(known, sum(r.steps_lost for r in recoveries))


def condition(raw: Raw, kind: str) -> Raw | None:
    found = (raw.get("status") or {}).get("conditions") or ()
    return next((c for c in found if c.get("type") == kind), None)


def find_end(job: Raw) -> str:
    """The condition that says that the job is over, or that it is being deleted; empty: neither."""
    if is_deleted(job):
        return "being deleted"
    return next((end for end in ("Complete", "Failed") if is_true(job, end)), "")


def is_true(raw: Raw, kind: str) -> bool:
    found = condition(raw, kind)
    return found is not None and found.get("status") == "True"


def is_whole(raw: Raw) -> bool:
    """Whether all wanted pods train. While a lost one has not come back, the others train, and its incident goes on."""
    world = (raw.get("status") or {}).get("world") or {}
    return is_true(raw, "Running") and int(world.get("ready") or 0) >= int(
        world.get("desired") or 0
    )


def _problem(status: Raw) -> str:
    found = condition({"status": status}, "CheckpointHealthy")
    if found is None or found.get("status") != "False":
        return ""
    return f"{found.get('reason')}: {found.get('message')}"


def _unsaved(status: Raw, checkpoint: Raw) -> int | None:
    step = status.get("step")
    return None if step is None else max(0, int(step) - int(checkpoint.get("step") or 0))


def _warnings(raw: Raw, now: float) -> list[str]:
    status, found = raw.get("status") or {}, []
    seen = text.seconds_of(status.get("observedAt"))
    if status.get("state") == "Running" and seen is not None and now - seen > STALE_SECONDS:
        found.append(
            f"these figures are {text.span(now - seen)} old: the step takes that long, or the operator is not running "
            f"({text.SHOW_OPERATOR}); training does not need it"
        )
    generation = (raw.get("metadata") or {}).get("generation")
    if generation and status.get("observedGeneration") not in (None, generation):
        found.append(
            "the newest change of the spec is not in effect yet: some settings wait for the next checkpoint"
        )
    return found + [str(note) for note in status.get("notes") or ()]


def _is_given_up(slot: Raw) -> bool:
    """Whether a smaller size has ended the slot. Status keeps the number of its next attempt."""
    return slot.get("cause") == "ScaledDown" and not slot.get("podUid")


def _slot(job: str, raw: Raw) -> Slot:
    attempt, note = int(raw["attempt"]), ""
    if raw.get("leavingSince"):
        note = f"leaving since {raw['leavingSince']}"
    elif attempt > 1 and raw.get("cause"):
        former = f", was on {raw['formerNode']}" if raw.get("formerNode") else ""
        note = f"{raw['cause']}{former}"
    return Slot(
        slot=int(raw["slot"]),
        attempt=attempt,
        pod=f"{job}-{raw['slot']}-{attempt}" if raw.get("podUid") else "",
        node=str(raw.get("node") or ""),
        note=note,
    )


def render_table(jobs: Sequence[Job], now: float, *, everywhere: bool) -> str:
    if not jobs:
        where = "in any namespace" if everywhere else "here (-A: everywhere)"
        return f"there is no ResilientTrainingJob {where}"
    head = ["NAME", "STATE", "READY", "STEP", "SAVED", "AGE", "UNSAVED", "INTERRUPTED", "LOST"]
    head += ["GOODPUT", "WHY"]
    rows = []
    for job in jobs:
        row: list[object] = [job.name, job.state, job.ready, job.step, job.checkpoint_step]
        row += [text.age(job.checkpoint_at, now), job.unsaved, job.interruptions, job.steps_lost]
        row += [job.goodput, _short(job.checkpoint_problem or job.message)]
        rows.append([job.namespace, *row] if everywhere else row)
    return text.table(["NAMESPACE", *head] if everywhere else head, rows)


def _short(message: str, limit: int = 80) -> str:
    return message if len(message) <= limit else message[: limit - 1] + "…"


def render_job(job: Job, now: float) -> str:
    lines = [f"{job.namespace}/{job.name}: {job.state}", text.block(_fields(job, now))]
    lines += [f"  WARNING: {w}" for w in job.warnings]
    if job.slots:
        rows = [[s.slot, s.pod, s.node, s.note] for s in job.slots]
        lines += ["", text.table(["SLOT", "POD", "NODE", "NOTE"], rows)]
    if job.incidents:
        lines += ["", render_incidents(job.incidents, now), ""]
        lines.append(f"more: kubectl everstep timeline -n {job.namespace} {job.name} last")
    return "\n".join(lines)


def _fields(job: Job, now: float) -> dict[str, object]:
    causes = ", ".join(f"{cause} {n}" for cause, n in sorted(job.by_cause.items()))
    return {
        "why": job.message,
        "ready": _alive(job),
        "progress": _how_far(job),
        "saved": _how_safe(job, now),
        "interrupted": f"{text.many(job.interruptions, 'time')}{f' ({causes})' if causes else ''}",
        "recovery": _describe_recovery(job),
        "time": _describe_time(job.seconds),
        "run": job.run,
    }


def _describe_recovery(job: Job) -> str:
    """The mean time without a step, by rung."""
    rungs = ", ".join(
        f"{r.rung} {r.count} × {text.brief(r.seconds / r.count)}" for r in job.recoveries if r.count
    )
    goodput = f"goodput {job.goodput}" if job.goodput else ""
    spares = "" if job.spare_seconds is None else f"spares held {job.spare_seconds / 3600:.1f} h"
    return "; ".join(p for p in (rungs, goodput, f"steps lost {job.steps_lost}", spares) if p)


def _describe_time(seconds: Mapping[str, float]) -> str:
    """Shares of the workers' time; those below 0.1 % are left out."""
    total = sum(seconds.values())
    shares = {name: 100 * spent / total for name, spent in seconds.items() if total > 0}
    found = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{name} {share:.1f}%" for name, share in found if share >= 0.1)


def _alive(job: Job) -> str:
    mesh = f", {job.mesh}" if job.mesh else ""
    epoch = f", epoch {job.epoch}" if job.epoch else ""
    return f"{job.ready} pods{mesh}{epoch}" if job.ready else ""


def _how_far(job: Job) -> str:
    if job.step is None:
        return "no step yet"
    until = f" of {job.until}" if job.until else ""
    return f"step {job.step}{until}" + (f", loss {job.loss:.4g}" if job.loss is not None else "")


def _how_safe(job: Job, now: float) -> str:
    if job.checkpoint_problem:
        return f"NOT SAFE: {job.checkpoint_problem}"
    if job.checkpoint_step is None:
        kept = f" in the store; step {job.kept_step} kept in memory" if job.kept_step else ""
        return f"nothing is saved yet{kept}"
    saved = f"checkpoint of step {job.checkpoint_step} ({text.size(job.checkpoint_bytes)})"
    ago = f", committed {text.age(job.checkpoint_at, now)} ago" if job.checkpoint_at else ""
    risk = f"; {text.many(job.unsaved, 'step')} since then" if job.unsaved else ""
    kept = f"; step {job.kept_step} kept in memory" if job.kept_step else ""
    return f"{saved}{ago}{risk}{kept}"


def render_incidents(found: Sequence[incidents.Incident], now: float) -> str:
    rows = [
        [
            i.id,
            text.age(i.started, now),
            i.cause,
            ",".join(i.nodes),
            ",".join(str(s) for s in i.slots),
            "open" if i.open else "over",
            None if i.cost.gpu_seconds is None else f"{i.cost.gpu_seconds:.0f}",
            i.cost.steps_lost,
        ]
        for i in found
    ]
    head = ["INCIDENT", "AGO", "CAUSE", "NODE", "SLOTS", "STATE", "GPU-SECONDS", "LOST"]
    return text.table(head, rows)

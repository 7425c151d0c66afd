"""A finished fault in one sentence: what happened, how it was recovered, how long it took."""

from collections.abc import Iterable, Sequence

from everstep_operator.jobs import faults
from everstep_operator.jobs.marks import is_withdrawn
from everstep_operator.model_status import Incident

OUTCOME_OF_RUNG = {
    "regroup": "the others continued in place",
    "restart": "all ranks restarted from a checkpoint",
    "move": "moved without a loss",
}
"""Rung → words for readers who do not know the rungs."""


def list_over(incidents: Iterable[Incident]) -> list[list[Incident]]:
    """The faults from which the job has recovered, newest last, each with its incidents."""
    return [f for f in faults.group_by_fault(incidents) if not any(i.open for i in f)]


def summarize(fault: Sequence[Incident]) -> str:
    """The interruptions of one fault, oldest first: signal, verdict, kind of recovery, checkpoint,
    steps lost, seconds per phase.
    """
    interruptions: dict[str, list[Incident]] = {}
    for incident in sorted(fault, key=lambda i: i.started_at):
        interruptions.setdefault(incident.id, []).append(incident)
    return "; then ".join(_summarize_one(entries) for entries in interruptions.values())


def _summarize_one(entries: Sequence[Incident]) -> str:
    """All `entries` have the same id: an operator of version 0.1 wrote one entry for each slot."""
    first = entries[0]
    parts = [
        f"{first.started_at} {first.cause}{_slots(entries)}: {first.message.rstrip('.')}",
        _describe_recovery(entries),
        _marks(entries),
        _phases(entries),
    ]
    return f"{'; '.join(p for p in parts if p)} [{first.id}]"


def _slots(entries: Sequence[Incident]) -> str:
    slots = sorted({slot for i in entries for slot in _slots_of(i)})
    word = "slot" if len(slots) == 1 else "slots"
    return f" ({word} {', '.join(map(str, slots))})" if slots else ""


def _slots_of(incident: Incident) -> list[int]:
    first = [incident.slot] if incident.slot is not None else []
    return [m.slot for m in incident.slots] or first


def _describe_recovery(entries: Sequence[Incident]) -> str:
    if all(map(is_withdrawn, entries)):
        return "withdrawn before anything had moved"
    rung = next((i.rung for i in entries if i.rung), None)
    step = max((i.resumed_step or 0 for i in entries), default=0)
    lost = [i.steps_lost for i in entries if i.steps_lost is not None]
    parts = [OUTCOME_OF_RUNG.get(rung, f"recovered by {rung}") if rung else _describe_end(entries)]
    parts += [f"from step {step}"] if step else []
    parts += [f"{sum(lost)} step{'' if sum(lost) == 1 else 's'} lost"] if lost else []
    return ", ".join(parts)


def _describe_end(entries: Sequence[Incident]) -> str:
    """A suspension and the end of the job end an incident, too."""
    unfinished = any(i.slots and all(m.name != "running" for m in i.marks) for i in entries)
    return "it ended before the job had recovered" if unfinished else "recovered"


def _marks(entries: Sequence[Incident]) -> str:
    """The marks of the entry that took longest."""
    longest = max(entries, key=lambda i: max((m.seconds for m in i.marks), default=0.0))
    marks = sorted(longest.marks, key=lambda m: m.seconds)
    return ", ".join(f"{m.name} after {m.seconds:.1f} s" for m in marks)


def _phases(entries: Sequence[Incident]) -> str:
    longest = max(entries, key=lambda i: len(i.phases))
    told = ", ".join(f"{p.name} {p.ms / 1000:.2f} s" for p in longest.phases)
    return f"the job measured {told}" if told else ""

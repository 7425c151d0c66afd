"""The launcher's terminal output: turns a change into lines. Pure."""

from collections.abc import Mapping

from everstep_contract import levels

START_SECONDS = 2.0
TAKES_OVER = (
    "another `everstep run` on this machine trains this run: it is taken over from its newest checkpoint, and the "
    "other one stops; to train both, give one of them another --run"
)


def is_start_slow(elapsed: float, seen: levels.Seen) -> bool:
    """Whether to print a start-up hint."""
    return elapsed > START_SECONDS and not seen.running and not seen.epoch


def describe_changes(before: levels.Seen, after: levels.Seen) -> list[str]:
    lines: list[str] = []
    if after.epoch != before.epoch and after.epoch:
        lines.append(f"epoch {after.epoch}: {_resumes(before, after)}")
    lines += _committed(before, after)
    lines += _incidents(before, after)
    lines += [f"note: {note}" for note in after.notes if note not in before.notes]
    if after.storage_error and not _same_trouble(before.storage_error, after.storage_error):
        lines.append(f"store: {after.storage_error.message}")
    if before.storage_error and not after.storage_error:
        lines.append("store: available again")
    return lines


def _same_trouble(before: levels.StorageError | None, after: levels.StorageError) -> bool:
    """Retries may name different objects, but one line is enough until the store is back."""
    return before is not None and before.kind == after.kind


def _resumes(before: levels.Seen, after: levels.Seen) -> str:
    """A short epoch may have committed before it is first seen, and did not resume from that."""
    if after.in_place:
        return "continues without a restart"
    known = [c for c in (after.committed, before.committed) if c is not None]
    earlier = next((c for c in known if c.epoch < after.epoch), None)
    if earlier is not None:
        return f"resumes from step {earlier.step}"
    return "trains" if known and after.epoch > 1 else "starts at step 0"


def _committed(before: levels.Seen, after: levels.Seen) -> list[str]:
    if after.fenced or after.committed is None:  # a run that was taken over sees the other job's
        return []
    known, newest = before.committed, after.committed
    if known is not None and (known.epoch, known.step) == (newest.epoch, newest.step):
        return []
    if before.run == "" and before.committed is None:
        return [f"found the checkpoint of step {after.committed.step}"]
    size = format_bytes(after.committed.bytes)
    return [f"checkpoint: step {after.committed.step} committed ({size})"]


def _incidents(before: levels.Seen, after: levels.Seen) -> list[str]:
    known = {i.id: i for i in before.incidents}
    lines: list[str] = []
    for now in after.incidents:
        old = known.get(now.id)
        if old is None:
            lines.append(_describe_begin(now))
        if not now.open and (old is None or old.open):
            total = sum(p.ms for p in now.phases) / 1000
            phases = ", ".join(f"{p.name.replace('_', ' ')} {p.ms / 1000:.2f}" for p in now.phases)
            verb = "moved" if now.cause in levels.IN_ORDER else "recovered"
            lines.append(
                f"{verb} in {total:.2f} s from step {now.step}, steps lost: {now.steps_lost} ({phases})"
            )
    return lines


def _describe_begin(incident: levels.RuntimeIncident) -> str:
    if incident.cause in levels.IN_ORDER:
        return f"{incident.cause.lower()}: {incident.message}"
    return f"interrupted: {incident.message} ({incident.cause})"


def has_steps(seen: levels.Seen) -> bool:
    return seen.committed is not None or seen.step > 0


def describe_lost(seen: levels.Seen) -> str:
    """What is lost if the run ends without another save."""
    if seen.committed is not None:
        return f"the steps after {seen.committed.step} are lost"
    return "all steps are lost" if has_steps(seen) else "no step was taken yet"


def describe_event(event: str, fields: Mapping[str, str]) -> str | None:
    """A line for an agent's event that a user wants to see, or None."""
    match event:
        case "worker_runs":
            return f"rank {fields.get('rank')} runs as pid {fields.get('pid')}"
        case "store_waits" | "upload_waits":
            return f"store: {fields.get('message')}"
        case "worker_hung" | "worker_waits" if "rank" in fields:
            return f"rank {fields['rank']} {fields.get('message')}"
        case "worker_waits":
            return f"slot {fields.get('slot')}: {fields.get('message')}"
        case (
            "zygote_unused"
            | "zygote_import_failed"
            | "zygote_ended"
            | "zygote_given_up"
            | "worker_frame_refused"
        ):
            return f"slot {fields.get('slot')}: {fields.get('message')}"
        case "agent_error":
            return f"agent of slot {fields.get('slot')}: {fields.get('message')}"
    return None


def format_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError(count)

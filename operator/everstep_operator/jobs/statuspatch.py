"""The smallest merge patch from the present status to the new one, and whether to write it now."""

from collections.abc import Mapping
from typing import Any

from everstep_operator.jobs.stamps import to_seconds, to_stamp
from everstep_operator.model_status import JobStatus

FIGURES = frozenset(
    {
        "step",
        "loss",
        "until",
        "checkpoint",
        "keptStep",
        "goodput",
        "seconds",
        "spareSeconds",
        "notes",
        "observedAt",
        "restarts",
        "recoveries",
    }
)
"""Fields that may be some seconds old; everything else is written at once."""


def choose_figures_seconds(least: float, jobs: int, writes_per_second: float) -> float:
    """Seconds between two writes of a job's figures. The interval grows with the number of jobs, so
    that all of them together stay below `writes_per_second` and leave room for writes that cannot
    wait.
    """
    return max(least, jobs / writes_per_second)


def to_document(status: JobStatus) -> dict[str, Any]:
    document: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return document


def build_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """An RFC 7386 merge patch: removed fields become null, and lists are complete (what is sent:
    see `patch_body`).
    """
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif isinstance(value, Mapping) and isinstance(old[key], Mapping):
            if inner := build_patch(old[key], value):
                patch[key] = inner
        elif value != old[key]:
            patch[key] = value
    return patch


def decide_patch(
    old: Mapping[str, Any], status: JobStatus, now: float, figures_seconds: float
) -> dict[str, Any]:
    """The patch to write now; empty: none. If only figures have changed, they wait until
    `figures_seconds` have passed since the last write.
    """
    new = to_document(status)
    new.pop("observedAt", None)
    if "observedAt" in old:
        new["observedAt"] = old["observedAt"]
    if not build_patch(_lasting(old), _lasting(new)):
        return {}
    urgent = build_patch(_urgent(old), _urgent(new))
    written = to_seconds(old.get("observedAt"))
    if not urgent and written is not None and 0 <= now - written < figures_seconds:
        return {}
    return build_patch(old, {**new, "observedAt": to_stamp(now)})


def _lasting(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without the fields that change merely because time passes."""
    passing = ("observedAt", "seconds", "spareSeconds")
    kept: dict[str, Any] = {k: v for k, v in document.items() if k not in passing}
    if isinstance(kept.get("checkpoint"), Mapping):
        kept["checkpoint"] = {k: v for k, v in kept["checkpoint"].items() if k != "ageSeconds"}
    return kept


def _urgent(document: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in document.items() if k not in FIGURES}
    incidents = kept.get("incidents") or ()
    kept["incidents"] = [_without_phases(i) for i in incidents]
    return kept


def _without_phases(incident: Any) -> Any:
    return (
        {k: v for k, v in incident.items() if k != "phases"}
        if isinstance(incident, Mapping)
        else incident
    )

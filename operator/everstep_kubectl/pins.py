"""Whether the checkpoint that a job was asked to pin exists. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep_kubectl import jobs

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    ok: bool
    message: str


def decide_pinned(job: Raw, name: str) -> Answer | None:
    """The answer to a request for a pinned checkpoint; None: it may still be made."""
    who = job["metadata"]["name"]
    pinned = (job.get("status") or {}).get("pinned") or {}
    if pinned.get("name") == name:
        if pinned.get("kept", True):
            where = f"checkpoint of step {pinned['step']} is pinned as {name}"
            return Answer(ok=True, message=f"{who}: the {where} ({pinned['manifest']})")
        text = f"{name} was step {pinned['step']}, and has been unpinned: choose another name"
        return Answer(ok=False, message=f"{who}: {text}")
    return decide_over(job)


def decide_over(job: Raw) -> Answer | None:
    """The answer for a job that is over, which saves no more checkpoints; None: it is not over."""
    over = next((k for k in ("Complete", "Failed") if jobs.is_true(job, k)), None)
    if over is None:
        return None
    who = job["metadata"]["name"]
    return Answer(ok=False, message=f"{who} is {over}: it saves no checkpoint any more")

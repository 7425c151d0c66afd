"""Whether the checkpoint that a job was asked to pin exists, or will. Pure."""

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
        return tell_unpinned(job, name)
    return decide_over(job)


def tell_unpinned(job: Raw, name: str) -> Answer:
    """The answer for a name whose pin was removed."""
    who, step = job["metadata"]["name"], job["status"]["pinned"]["step"]
    text = f"{name} was step {step}, and has been unpinned; a run uses each name once: choose another name"
    return Answer(ok=False, message=f"{who}: {text}")


def is_older(pinned: Raw, before: Raw) -> bool:
    """Whether the pinned checkpoint had been made before the job was read. Its status may then show a pin that
    was given up: a job reads the run log every ten seconds, and a suspended one never.
    """
    saved = ((before.get("status") or {}).get("checkpoint") or {}).get("step") or 0
    return int(pinned["status"]["pinned"]["step"]) <= int(saved)


def decide_suspended(job: Raw) -> Answer | None:
    """The answer for a job that is, or is about to be, suspended; None: it may run."""
    if not job["spec"].get("suspend"):
        return None
    meta = job["metadata"]
    return Answer(
        ok=False,
        message=f"{meta['name']} is suspended: it saves no checkpoint until it runs again. "
        f"To let it run: kubectl everstep resume -n {meta['namespace']} {meta['name']}",
    )


def decide_over(job: Raw) -> Answer | None:
    """The answer for a job that is over, which saves no more checkpoints; None: it is not over."""
    over = jobs.find_end(job)
    if not over:
        return None
    who = job["metadata"]["name"]
    return Answer(ok=False, message=f"{who} is {over}: it saves no checkpoint any more")

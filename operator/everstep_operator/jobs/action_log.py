"""The log lines of a pass: one for each action and each Event, with the incident's id as a field."""

import logging

from everstep_operator.jobs.actions import Action, CheckTemplate, CreatePod, CreateSecret, DeletePod
from everstep_operator.jobs.observed import Job
from everstep_operator.logs import fields
from everstep_operator.model_status import JobStatus
from everstep_operator.values import EventDraft

log = logging.getLogger(__name__)


def log_done(job: Job, action: Action, status: JobStatus) -> None:
    if isinstance(action, (CreateSecret, CheckTemplate)):
        return
    slot = action.slot if isinstance(action, (CreatePod, DeletePod)) else None
    incident = find_incident(status, slot)
    _say(logging.INFO, job, action.reason, action.message, incident)


def log_event(job: Job, event: EventDraft) -> None:
    level = logging.WARNING if event.warning else logging.INFO
    _say(level, job, event.reason, event.message, event.incident)


def find_incident(status: JobStatus, slot: int | None) -> str:
    """The newest open incident that moves the slot; empty: there is none."""
    moves = [i.id for i in status.incidents if i.open and i.slot == slot and slot is not None]
    return moves[-1] if moves else ""


def _say(level: int, job: Job, reason: str, message: str, incident: str) -> None:
    name = f"{job.namespace}/{job.name}"
    extra = fields(job=name, reason=reason, incident=incident)
    log.log(level, "%s: %s: %s", name, reason, message, extra=extra)

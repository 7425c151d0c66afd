"""Performs the plan's actions in order, then writes one status patch, then the Events. It decides
nothing: the next pass observes the result.

The Events of a plan that only counts are written after the next plan's actions, so that they do not
delay these actions.
"""

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.jobs import action_log, genuine, manifests, patch_body, statuspatch
from everstep_operator.jobs.actions import (
    Action,
    CheckTemplate,
    CreatePod,
    CreateSecret,
    DeleteJob,
    DeletePod,
    Plan,
)
from everstep_operator.jobs.genuine import JobKeys
from everstep_operator.jobs.observed import Job
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.kube import Kube
from everstep_operator.pacing import Lane
from everstep_operator.values import EventDraft

COMPONENT = "everstep-operator"
EVENT_LIMIT = 1024

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """The result of a plan; read by the pass, counted by the metrics."""

    done: list[str] = field(default_factory=list)
    """Names of the actions that were done."""
    refusal: tuple[bool, str] | None = None
    """(permanent, the API server's message): a pod or Secret was rejected."""
    urgent: bool = False
    """`refusal` is that of a pod that replaces a lost one, or of the Secret."""
    spare_refusal: tuple[bool, str] | None = None
    """The same for a spare; the plan continues."""
    added: bool = False
    """A pod that replaces none was created."""
    template_checked: bool = False
    patched: Mapping[str, Any] | None = None
    """The object as returned by the status patch."""
    again: bool = False
    """Something else has changed: observe again soon."""
    made: list[kube.Object] = field(default_factory=list)
    """The created pods, which no watch may have reported yet."""
    gone: list[str] = field(default_factory=list)
    """Names of pods that were to be deleted and no longer exist."""
    untold: tuple[EventDraft, ...] = ()
    """Events to be written after the next plan's actions."""
    trouble: kube.KubeError | None = None
    """Why an action may not have been done: the plan ends, and the pass is to be repeated."""
    undeleted: kube.KubeError | None = None
    """A refusal of a deletion: the plan continues, and the pass is to be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Limits on writes that may wait."""

    figures_seconds: float
    """If only figures have changed, they are written at most this often."""
    untold: tuple[EventDraft, ...] = ()
    """Events of earlier passes."""


async def apply_plan(
    port: Kube, job: Job, plan: Plan, keys: JobKeys, now: float, pace: Pace
) -> Outcome:
    """Raises `kube.Transient` and `kube.Denied` of the status to the outer loop. A refusal of an
    action, and an API server that does not answer one, are in the outcome: the status is written
    nevertheless.
    """
    outcome = Outcome()
    for action in plan.actions:
        if await _apply_action(port, job, action, keys, outcome):
            action_log.log_done(job, action, plan.status)
        if outcome.refusal or outcome.again or outcome.trouble:
            break
    patch = statuspatch.decide_patch(job.raw_status, plan.status, now, pace.figures_seconds)
    if patch:
        await _patch_status(port, job, patch, plan.counts, outcome)
    events = plan.events if outcome.patched is not None or not patch else ()
    for happening in events:
        action_log.log_event(job, happening)
    outcome.untold = (*pace.untold, *events)
    if not plan.counts:
        await _write_events(port, job, outcome, now)
    return outcome


async def _write_events(port: Kube, job: Job, outcome: Outcome, now: float) -> None:
    while outcome.untold:
        happening, *rest = outcome.untold
        await create_event(port, job, happening, now)
        outcome.untold = tuple(rest)


async def _apply_action(
    port: Kube, job: Job, action: Action, keys: JobKeys, outcome: Outcome
) -> bool:
    """Perform one action; returns whether it was done."""
    try:
        await _do(port, job, action, keys, outcome)
    except kube.Gone:
        outcome.again = isinstance(action, (CreatePod, CreateSecret))
        outcome.gone += [action.name] if isinstance(action, DeletePod) else []
    except kube.Conflict:
        outcome.again = True
        return False
    except (kube.Invalid, kube.Denied, kube.Transient) as error:
        _note_failure(outcome, action, error)
        return False
    outcome.done.append(type(action).__name__)
    outcome.added |= isinstance(action, CreatePod) and not action.urgent
    outcome.template_checked |= isinstance(action, CheckTemplate)
    return not outcome.again


def _note_failure(outcome: Outcome, action: Action, error: kube.KubeError) -> None:
    """A refused deletion stops nothing: no pod waits for the end of its slot's former one."""
    refused = not isinstance(error, kube.Transient) or kube.has_failed_webhook(error)
    if refused and isinstance(action, (DeletePod, DeleteJob)):
        outcome.undeleted = error
    elif refused and not (isinstance(action, CreateSecret) and isinstance(error, kube.Transient)):
        _note_refusal(outcome, action, (is_template_fault(error), error.message))
    else:
        outcome.trouble = error


def _note_refusal(outcome: Outcome, action: Action, refusal: tuple[bool, str]) -> None:
    if isinstance(action, CreatePod | CheckTemplate) and action.spare:
        outcome.spare_refusal = refusal
    elif isinstance(action, CreatePod | CheckTemplate):
        outcome.refusal, outcome.urgent = refusal, action.urgent
    elif not (isinstance(action, CreateSecret) and action.made_before):
        # A quota answers before the API server finds that the Secret exists.
        outcome.refusal, outcome.urgent = refusal, True


def is_template_fault(error: kube.KubeError) -> bool:
    """Whether only an edit of the template helps. A quota, a policy or a webhook may allow the pod
    later, but Pod Security depends on the template alone.
    """
    invalid = isinstance(error, kube.Invalid) and not kube.is_denied_by_policy(error)
    return invalid or "violates PodSecurity" in error.message


async def _do(port: Kube, job: Job, action: Action, keys: JobKeys, outcome: Outcome) -> None:
    match action:
        case CreateSecret():
            await _create_secret(port, manifests.build_secret(job, keys.token), job)
        case CheckTemplate(body=body):
            await _create_pod(port, body, job, keys, dry_run=True)
        case CreatePod(slot=slot, attempt=attempt, body=body):
            body = manifests.with_proof(body, genuine.derive_proof(keys, slot, attempt))
            lane = _choose_lane(action)
            outcome.made.append(await _create_pod(port, body, job, keys, lane=lane))
        case DeletePod():
            grace = 0 if action.force else None
            await port.delete(
                kube.PODS,
                action.name,
                job.namespace,
                uid=action.uid,
                grace_seconds=grace,
                lane=_choose_lane(action),
            )
        case DeleteJob():
            await port.delete(kube.JOBS, job.name, job.namespace, uid=job.uid)


def _choose_lane(action: CreatePod | DeletePod) -> Lane:
    """The start and the end of a large job are thousands of writes, which must not hold up the others'
    recoveries. A pass creates few pods at once, so it keeps its place meanwhile; it may delete many.
    """
    if action.urgent:
        return Lane.RECOVERY
    return Lane.START if isinstance(action, CreatePod) else Lane.STATUS


async def _create_secret(port: Kube, body: manifests.Body, job: Job) -> None:
    """An existing Secret counts as the operator's: its name contains the job's UID, and the
    operator may not read it. A wrong token in it affects only this job, whose agents would reject
    the operator.
    """
    with contextlib.suppress(kube.AlreadyExists):
        await port.create(kube.SECRETS, body, job.namespace)


async def _create_pod(
    port: Kube,
    body: manifests.Body,
    job: Job,
    keys: JobKeys,
    *,
    dry_run: bool = False,
    lane: Lane = Lane.RECOVERY,
) -> kube.Object:
    """A pod that already exists counts as the result of an earlier create, if it is one of the
    job's own.
    """
    try:
        return await port.create(kube.PODS, body, job.namespace, dry_run=dry_run, lane=lane)
    except kube.AlreadyExists:
        name = body["metadata"]["name"]
        found = await port.get(kube.PODS, name, job.namespace)
        owner = genuine.build_owner(job.key, job.uid, job.raw_status, keys)
        if genuine.find_place(found, owner) is None:
            raise kube.Denied(409, "AlreadyExists", _describe_other(found, job)) from None
        return found


def _describe_other(pod: Mapping[str, Any], job: Job) -> str:
    """What a pod is that has the name of one of the job's pods and is none of them."""
    metadata = pod["metadata"]
    owners = metadata.get("ownerReferences") or ()
    if any(o.get("kind") == names.KIND and o.get("name") == job.name for o in owners):
        return f"pod {metadata['name']} of an earlier job of this name is still ending; this job starts after it"
    return f"pod {metadata['name']} exists and was not made by Everstep: delete it"


async def _patch_status(
    port: Kube, job: Job, patch: dict[str, Any], urgent: bool, outcome: Outcome
) -> None:
    """The patch carries the observed resourceVersion. If the object has changed since, the status
    is built again and does not overwrite the change.
    """
    lane = Lane.RECOVERY if urgent else Lane.STATUS
    try:
        outcome.patched = await _send_patch(port, job, patch, lane)
        outcome.done.append("PatchStatus")
    except kube.Conflict:
        outcome.again = True
    except kube.Gone:
        log.info("%s/%s: the job is gone", job.namespace, job.name)


async def _send_patch(port: Kube, job: Job, patch: dict[str, Any], lane: Lane) -> kube.Object:
    """If the API server rejects a JSON patch as invalid, the merge patch follows, and its answer
    names the problem.
    """
    *shorter, last = patch_body.build_bodies(job.resource_version, job.raw_status, patch)
    for body in shorter:
        with contextlib.suppress(kube.Invalid):
            return await port.patch(
                kube.JOBS, job.name, body, job.namespace, sub="status", lane=lane
            )
    return await port.patch(kube.JOBS, job.name, last, job.namespace, sub="status", lane=lane)


async def report_failure(port: Kube, job: Job, error: Exception, now: float) -> None:
    """Write an Event on the job, so that users need not read the operator's log to see that it
    cannot act.
    """
    found = f"{type(error).__name__}: {error}"
    fix = (
        "if a right is missing: give the operator's ServiceAccount its rights back (helm upgrade); if a quota or an "
        "admission policy refused it: change that"
        if isinstance(error, kube.Denied)
        else "this is a bug in Everstep: please report it with the operator's log"
    )
    message = f"the operator cannot act for this job and tries again: {found}; {fix}"
    happening = EventDraft(reason="PassFailed", message=message, warning=True)
    await create_event(port, job, happening, now)


async def create_event(port: Kube, job: Job, happening: EventDraft, now: float) -> None:
    """The Event's name is computed from its text, so a repeated Event is written once."""
    words = "\n".join((job.uid, happening.reason, happening.message, happening.stamp))
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": f"{kube.JOBS.group}/{kube.JOBS.version}",
            "kind": "ResilientTrainingJob",
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "type": "Warning" if happening.warning else "Normal",
        "reason": happening.reason[:128],
        "message": happening.message[:EVENT_LIMIT],
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": to_stamp(now),
        "lastTimestamp": to_stamp(now),
        "count": 1,
    }
    try:
        await port.create(kube.EVENTS, body, job.namespace, lane=Lane.STATUS)
    except (kube.AlreadyExists, kube.Gone):
        return
    except kube.KubeError as error:
        log.warning("%s/%s: no Event %s: %s", job.namespace, job.name, happening.reason, error)

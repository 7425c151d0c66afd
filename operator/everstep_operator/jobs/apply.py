"""The plan's actions, in order, then one status patch, then Events. No decisions: what it learns,
the next pass observes.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_operator import kube
from everstep_operator.jobs import manifests, saying, statuspatch
from everstep_operator.jobs.actions import (
    Action,
    CheckTemplate,
    CreatePod,
    CreateSecret,
    DeleteJob,
    DeletePod,
    Plan,
)
from everstep_operator.jobs.observed import Job
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.kube import Kube
from everstep_operator.pacing import Lane
from everstep_operator.values import Happening

COMPONENT = "everstep-operator"
EVENT_LIMIT = 1024

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What became of a plan; the pass reads it, metrics count it."""

    done: list[str] = field(default_factory=list)
    """Names of the actions that were done."""
    refusal: tuple[bool, str] | None = None
    """(wrong for good, the API server's words): a pod or Secret was not accepted."""
    template_checked: bool = False
    patched: Mapping[str, Any] | None = None
    """The object as the status patch left it."""
    again: bool = False
    """Something else has moved: observe again soon."""
    gone: list[str] = field(default_factory=list)
    """Names of pods that were to be deleted and are not there."""


async def apply_plan(
    port: Kube, job: Job, plan: Plan, token: str, now: float, figures_seconds: float
) -> Outcome:
    """Raises `kube.Transient` and `kube.Denied` (other than of a pod) to the loop's edge."""
    outcome = Outcome()
    for action in plan.actions:
        if await _apply_action(port, job, action, token, outcome):
            saying.say_done(job, action, plan.status)
        if outcome.refusal or outcome.again:
            break
    patch = statuspatch.decide_patch(job.raw_status, plan.status, now, figures_seconds)
    if patch:
        await _patch_status(port, job, patch, plan.counts, outcome)
    if outcome.patched is not None or not patch:
        for happening in plan.events:
            saying.say_happening(job, happening)
            await create_event(port, job, happening, now)
    return outcome


async def _apply_action(port: Kube, job: Job, action: Action, token: str, outcome: Outcome) -> bool:
    """Whether it was done."""
    try:
        await _do(port, job, action, token)
    except kube.Gone:
        outcome.again = isinstance(action, (CreatePod, CreateSecret))
        outcome.gone += [action.name] if isinstance(action, DeletePod) else []
    except kube.Conflict:
        outcome.again = True
        return False
    except (kube.Invalid, kube.Denied) as error:
        if not isinstance(action, (CheckTemplate, CreatePod, CreateSecret)):
            raise
        outcome.refusal = is_template_fault(error), error.message
        return False
    outcome.done.append(type(action).__name__)
    outcome.template_checked |= isinstance(action, CheckTemplate)
    return not outcome.again


def is_template_fault(error: kube.KubeError) -> bool:
    """Waiting helps against a quota or a policy, not against Pod Security: that judges the template alone."""
    return isinstance(error, kube.Invalid) or "violates PodSecurity" in error.message


async def _do(port: Kube, job: Job, action: Action, token: str) -> None:
    match action:
        case CreateSecret():
            await _create(port, kube.SECRETS, job, manifests.build_secret(job, token))
        case CheckTemplate(body=body):
            await _create(port, kube.PODS, job, body, dry_run=True)
        case CreatePod(body=body):
            await _create(port, kube.PODS, job, body)
        case DeletePod():
            grace = 0 if action.force else None
            await port.delete(
                kube.PODS, action.name, job.namespace, uid=action.uid, grace_seconds=grace
            )
        case DeleteJob():
            await port.delete(kube.JOBS, job.name, job.namespace, uid=job.uid)


async def _create(
    port: Kube, kind: kube.Kind, job: Job, body: manifests.Body, *, dry_run: bool = False
) -> None:
    """ "Already exists" is done if it is ours. Secrets carry our UID in the name, and we may not read them."""
    try:
        await port.create(kind, body, job.namespace, dry_run=dry_run)
    except kube.AlreadyExists:
        if kind is kube.SECRETS:
            return
        found = await port.get(kind, body["metadata"]["name"], job.namespace)
        owners = found["metadata"].get("ownerReferences") or ()
        if not any(o.get("uid") == job.uid for o in owners):
            text = (
                f"pod {body['metadata']['name']} exists and is not this job's: delete or rename it"
            )
            raise kube.Denied(409, "AlreadyExists", text) from None


async def _patch_status(
    port: Kube, job: Job, patch: dict[str, Any], urgent: bool, outcome: Outcome
) -> None:
    """With the version that was observed: a status built on an older object is built anew, not forced."""
    body = {"metadata": {"resourceVersion": job.resource_version}, "status": patch}
    lane = Lane.RECOVERY if urgent else Lane.STATUS
    try:
        outcome.patched = await port.patch(
            kube.JOBS, job.name, body, job.namespace, sub="status", lane=lane
        )
        outcome.done.append("PatchStatus")
    except kube.Conflict:
        outcome.again = True
    except kube.Gone:
        log.info("%s/%s: the job is gone", job.namespace, job.name)


async def say_failed(port: Kube, job: Job, error: Exception, now: float) -> None:
    """On the job itself: who looks at it should not need the operator's log to see that nobody acts for it."""
    found = f"{type(error).__name__}: {error}"
    fix = (
        "give the operator's ServiceAccount its rights back (helm upgrade)"
        if isinstance(error, kube.Denied)
        else "this is a fault of Everstep: please report it with the operator's log"
    )
    message = f"the operator cannot act for this job and tries again: {found}; {fix}"
    happening = Happening(reason="PassFailed", message=message, warning=True)
    await create_event(port, job, happening, now)


async def create_event(port: Kube, job: Job, happening: Happening, now: float) -> None:
    """Its name is computed from what it says: said twice, it is written once."""
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

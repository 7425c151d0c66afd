"""Applies a plan's actions in order, and writes each action's Event once it is done. It decides
nothing: the next pass observes the result.
"""

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep_operator import kube
from everstep_operator.evidence import to_rfc3339
from everstep_operator.fleet.actions import (
    Action,
    ActionKey,
    CreateQuarantine,
    PatchNode,
    PatchSpec,
    PatchStatus,
    Tell,
    key_of,
)
from everstep_operator.fleet.memory import REFUSED_SECONDS
from everstep_operator.pacing import Lane
from everstep_operator.quarantines import build_object, build_spec

COMPONENT = "everstep-operator"
REFUSALS = frozenset({400, 403, 413, 422})
"""Statuses that concern one object, as does a failed webhook. Of the others, 401 concerns this process,
and 405 means that the CRD is being deleted.
"""
EVENT_NAMESPACE = "default"
"""Where Events about cluster-scoped objects live."""
REPEAT_SECONDS = 2700.0
"""How often the Event of a `Tell` is written while its state lasts: API servers delete Events after an
hour.
"""

log = logging.getLogger(__name__)


class Port(Protocol):
    """The part of `kube.Kube` that is used."""

    async def create(
        self,
        kind: kube.Kind,
        body: kube.Object,
        namespace: str | None = None,
        *,
        dry_run: bool = False,
        lane: Lane = Lane.RECOVERY,
    ) -> kube.Object: ...

    async def patch(
        self,
        kind: kube.Kind,
        name: str,
        body: kube.Object | list[kube.Object],
        namespace: str | None = None,
        *,
        sub: str | None = None,
        strategic: bool = False,
        lane: Lane = Lane.RECOVERY,
    ) -> kube.Object: ...


@dataclass(slots=True)
class Outcome:
    done: list[str] = field(default_factory=list)
    """Names of the actions that were done."""
    nodes: list[kube.Object] = field(default_factory=list)
    """Nodes as returned by the patches."""
    again: bool = False
    """Something had changed since it was read: observe again."""
    refused: set[ActionKey] = field(default_factory=set)
    """Actions that the API server refuses, and NodeQuarantines whose name is taken."""
    told: list[Tell] = field(default_factory=list)
    """Those whose turn came: an exception ends a plan early."""


async def apply_plan(
    port: Port, actions: Iterable[Action], now: float, events: Port | None = None
) -> Outcome:
    """Apply the actions. `events` writes the Events if they need another identity than nodes do.

    An action that the API server refuses (a policy; an admission webhook, also one that does not
    answer) holds up no other, nor does one whose object has changed or is gone.

    Raises `kube.KubeError`, except these. What was done before stays done.
    """
    outcome = Outcome()
    for action in actions:
        try:
            done = await _apply(port, events or port, action, now, outcome)
        except (kube.Conflict, kube.Gone) as error:
            log.info("%s of %s: %s; observing again", *key_of(action), error.message)
            outcome.again = True
            continue
        except (kube.Denied, kube.Invalid, kube.Transient) as error:
            if not (error.status in REFUSALS or kube.has_failed_webhook(error)):
                raise
            key = key_of(action)
            outcome.refused.add(key)
            text = "%s of %s is refused: %s; other nodes are not affected, and it is tried again in %.0f s"
            log.warning(text, *key, error.message, REFUSED_SECONDS)
            continue
        if done:
            outcome.done.append(type(action).__name__)
    return outcome


async def _apply(port: Port, events: Port, action: Action, now: float, outcome: Outcome) -> bool:
    """Return whether it changed anything."""
    match action:
        case CreateQuarantine(quarantine=quarantine):
            if not await _create(port, build_object(quarantine)):
                outcome.refused.add(key_of(action))
                return False
            await _tell(events, action, "Node", quarantine.node, now)
        case PatchSpec(quarantine=quarantine):
            body = _versioned(quarantine.version, spec=build_spec(quarantine))
            await port.patch(kube.QUARANTINES, quarantine.name, body)
            await _tell(events, action, "Node", quarantine.node, now)
        case PatchStatus(quarantine=quarantine, status=status):
            body = _versioned(quarantine.version, status=dict(status))
            await port.patch(
                kube.QUARANTINES, quarantine.name, body, sub="status", lane=Lane.STATUS
            )
        case PatchNode(node=node, body=body):
            lane = Lane.RECOVERY if action.reason else Lane.STATUS
            outcome.nodes.append(await port.patch(kube.NODES, node.name, dict(body), lane=lane))
            await _tell(events, action, "Node", node.name, now)
        case Tell(node=name):
            outcome.told.append(action)
            await _tell(events, action, "Node" if name else "Namespace", name or "default", now)
    return True


async def _create(port: Port, body: kube.Object) -> bool:
    """Names are computed. An existing object was created by an earlier pass that was interrupted, or
    an edit has taken it from its node: it must not hold up other nodes.
    """
    try:
        await port.create(kube.QUARANTINES, body)
    except kube.AlreadyExists:
        text = "NodeQuarantine %s exists, but not for node %s; if its spec was edited, delete it"
        log.warning(text, body["metadata"]["name"], body["spec"]["nodeName"])
        return False
    return True


def _versioned(version: str, **parts: Any) -> kube.Object:
    return {"metadata": {"resourceVersion": version}, **parts}


Told = CreateQuarantine | PatchSpec | PatchNode | Tell


async def _tell(port: Port, action: Told, kind: str, name: str, now: float) -> None:
    """Log the action and write its Event. The Event's name is computed from its text (of a `Tell`,
    also from the period), so that a repeated one is written once. A failure is only logged.
    """
    if not action.reason:
        return
    log.log(
        logging.WARNING if action.warning else logging.INFO, "%s: %s", action.reason, action.message
    )
    stamp = f"{now // REPEAT_SECONDS:.0f}" if isinstance(action, Tell) else ""
    body = build_event(kind, name, action, stamp, now)
    try:
        await port.create(kube.EVENTS, body, EVENT_NAMESPACE, lane=Lane.STATUS)
    except kube.AlreadyExists:
        return
    except kube.KubeError as error:
        log.warning("no Event %s: %s", action.reason, error)


def build_event(kind: str, name: str, told: Told, stamp: str, now: float) -> dict[str, Any]:
    """An Event about a node, or about a namespace. As UID it has the object's name, as the kubelet
    writes it for nodes and `kubectl describe node` expects it.
    """
    text = f"{told.reason}\n{told.message}\n{stamp}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    at = to_rfc3339(now)[:-5] + "Z"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name[:200]}.{digest}", "namespace": EVENT_NAMESPACE},
        "involvedObject": {"apiVersion": "v1", "kind": kind, "name": name, "uid": name},
        "type": "Warning" if told.warning else "Normal",
        "reason": told.reason[:128],
        "message": told.message[:1024],
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }

"""kopf provides the watches and their queue: raw event handlers store the object and wake a pass.

There are no create, update, delete or field handlers, daemons or timers: those put finalizers
and annotations on objects, and a pod or node must never wait for the operator.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import kopf

from everstep_contract import names
from everstep_operator.jobs import observe, passes
from everstep_operator.nodes import NodeFacts, to_facts
from everstep_operator.scheduler import Scheduler
from everstep_operator.values import NodeVerdict
from everstep_operator.world import Key, Mirror, Object, World, job_of, key_of

RawEvent = Mapping[str, Any]


def build_settings() -> kopf.OperatorSettings:
    """Settings that detect a silent watch and end a hanging request; kopf posts no Events."""
    settings = kopf.OperatorSettings()
    settings.watching.inactivity_timeout = 70
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 360
    settings.watching.chunk_size = 500
    settings.watching.label_selectors["pods"] = names.LABEL_JOB
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    # In total as long as kopf's default, which may sleep on for 20 s after the API server is back.
    settings.networking.error_backoffs = (1, 1, 2, 3, *[5] * 10)
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{names.GROUP}/unused"
    return settings


@dataclass(slots=True)
class Watchers:
    """Stores each watch event in the world and wakes the objects that it concerns."""

    world: World
    scheduler: Scheduler
    wake_fleet: Callable[[], None]
    quarantine_deleted: Callable[[Object], None]
    on_event: Callable[[str], None] = lambda kind: None
    listed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a watch has restarted with a list: a list does not show what was deleted in the
    meantime.
    """

    def see_job(self, event: RawEvent) -> None:
        self._note("jobs", self.world.jobs, event)
        self.scheduler.wake(key_of(event["object"]))

    def see_pod(self, event: RawEvent) -> None:
        self._note("pods", self.world.pods, event)
        if key := job_of(event["object"]):
            self.scheduler.wake(key)

    def see_node(self, event: RawEvent) -> None:
        name = event["object"]["metadata"]["name"]
        before = self.world.nodes.get(name)
        self._note("nodes", self.world.nodes, event)
        after = self.world.nodes.get(name)
        if _readiness(before) != _readiness(after):
            self._wake_jobs_on({name})
        if (before is None) != (after is None):
            self._wake(self.world.jobs_shutting_out({name}))
        if _facts(before) != _facts(after):
            self.wake_fleet()

    def see_quarantine(self, event: RawEvent) -> None:
        self._note("nodequarantines", self.world.quarantines, event)
        if event["type"] == "DELETED":
            self.quarantine_deleted(event["object"])
        self.wake_fleet()

    def wake_all(self) -> None:
        for job in self.world.jobs:
            self.scheduler.wake(key_of(job))

    def _note(self, kind: str, mirror: Mirror, event: RawEvent) -> None:
        self.on_event(kind)
        if event["type"] == "DELETED":
            mirror.drop(event["object"])
            return
        mirror.put(event["object"])
        if event["type"] is None:
            self.listed.set()

    def _wake_jobs_on(self, nodes: set[str]) -> None:
        self._wake(self.world.jobs_on(nodes))

    def _wake(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.scheduler.wake(key)


def _readiness(node: Object | None) -> str | None:
    return None if node is None else observe.describe_not_ready(node)


def _facts(node: Object | None) -> NodeFacts | None:
    """The node as the fleet sees it: a heartbeat does not change it."""
    return None if node is None else replace(to_facts(node), version="")


@dataclass(slots=True)
class VerdictBoard:
    """Receives the verdicts of `health` and wakes the jobs that a changed verdict concerns.

    These are the jobs with a pod on such a node, and the jobs with a waiting pod that excludes such
    a node: the pod must be recreated before it can use the node.
    """

    passes: passes.Passes
    wake: Callable[[Key], None]

    def publish(self, verdicts: Mapping[str, NodeVerdict], judged_at: Mapping[str, float]) -> None:
        old, world = self.passes.verdicts, self.passes.world
        if judged_at != self.passes.judged_at:
            for key in self.passes.awaiting_judgment:
                self.wake(key)
        self.passes.verdicts, self.passes.judged_at = dict(verdicts), judged_at
        if old is None:
            concerned = {key_of(job) for job in world.jobs}
        else:
            changed = {n for n in {*old, *verdicts} if old.get(n) != verdicts.get(n)}
            concerned = world.jobs_on(changed) | world.jobs_shutting_out(changed)
        for key in concerned:
            self.wake(key)


def build_registry(watchers: Watchers) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry, id="login")
    async def login(**kwargs: Any) -> Any:
        mounted = kopf.login_with_service_account(**kwargs)
        return kopf.login_with_kubeconfig(**kwargs) or use_address(mounted, os.environ)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry, id="job")
    async def job(event: RawEvent, **_: Any) -> None:
        watchers.see_job(event)

    @kopf.on.event("v1", "pods", registry=registry, id="pod")
    async def pod(event: RawEvent, **_: Any) -> None:
        watchers.see_pod(event)

    if watchers.world.scope.nodes:
        _add_nodes(registry, watchers)
    return registry


def use_address(
    found: kopf.ConnectionInfo | None, environ: Mapping[str, str]
) -> kopf.ConnectionInfo | None:
    """Replace the API server's name by its address, which the kubelet puts into the environment: the
    watches must not need the cluster's DNS, which an outage of nodes may take away.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if found is None or not host or not port:
        return found
    return replace(found, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")


def _add_nodes(registry: kopf.OperatorRegistry, watchers: Watchers) -> None:
    @kopf.on.event("v1", "nodes", registry=registry, id="node")
    async def node(event: RawEvent, **_: Any) -> None:
        watchers.see_node(event)

    @kopf.on.event(
        names.GROUP, names.VERSION, names.QUARANTINE_PLURAL, registry=registry, id="quarantine"
    )
    async def quarantine(event: RawEvent, **_: Any) -> None:
        watchers.see_quarantine(event)


async def run_kopf(watchers: Watchers, ready: asyncio.Event) -> None:
    """Run until a signal; raise if a watch cannot continue. `ready` is set once kopf's signal
    handlers are installed.
    """
    namespaces = watchers.world.scope.namespaces
    await kopf.operator(
        registry=build_registry(watchers),
        settings=build_settings(),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        # By default kopf looks up the user's name, and a container's uid may have none.
        identity="everstep-operator",  # type: ignore[arg-type]
        ready_flag=ready,
    )

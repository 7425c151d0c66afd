"""The loop: scrape, remember, decide, publish, apply; what `handlers` starts and wakes.

Two clocks. Every interval all exporters are scraped; after that, and whenever a node or a
NodeQuarantine changes, a fleet pass runs, again and again until its plan is empty. Nothing of this
process's memory is needed to be right: what must last stands on nodes and in NodeQuarantines.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from everstep_operator import kube
from everstep_operator.evidence import Finding
from everstep_operator.fleet import apply, release
from everstep_operator.fleet.actions import Action, Tell
from everstep_operator.fleet.observing import plan_observing
from everstep_operator.fleet.plan import Plan, plan
from everstep_operator.fleet.view import Observed, Policy, parse_budget
from everstep_operator.health.metrics import HealthMetrics
from everstep_operator.health.outcomes import FailureKind, Scrape, ScrapeFailure, Target
from everstep_operator.health.rules import decide_node
from everstep_operator.health.scrape import Scraper
from everstep_operator.health.signals import NodeMemory, build_limits, remember
from everstep_operator.health.targets import choose_targets
from everstep_operator.health.verdicts import choose_verdicts
from everstep_operator.health.xids import load_xids
from everstep_operator.health_seam import Verdicts
from everstep_operator.kube import Kube
from everstep_operator.nodes import NodeFacts, to_facts
from everstep_operator.quarantines import Quarantine, QuarantineError, build_object, to_quarantine
from everstep_operator.settings import Settings
from everstep_operator.values import NodeVerdict
from everstep_operator.world import World

log = logging.getLogger(__name__)

RELIST_SECONDS = 60.0
"""Exporter pods rarely move; a failed scrape lists them at once."""
PASS_ROUNDS = 12
"""Passes in a row: create, mark, status and a release need five."""
AGAIN_SECONDS = 1.0
"""After a conflict that the mirrors could not resolve yet: nothing else may wake us."""
WAKE_PAUSE = 0.05
"""Changes come in bunches."""


class HealthLoop:
    """See `everstep_operator.health_seam`. `clock` gives seconds since the Unix epoch."""

    def __init__(
        self,
        *,
        kube: Kube,
        world: World,
        settings: Settings,
        verdicts: Verdicts,
        nodes: Kube | None = None,
        clock: Callable[[], float] = time.time,  # noqa: TID251 the operator's one wall clock here
    ) -> None:
        self._kube, self._world, self._settings, self._verdicts = kube, world, settings, verdicts
        self._nodes_port = nodes or kube
        """Writes about nodes, and nothing else."""
        self._clock = clock
        self._table = load_xids()
        self._limits = build_limits(settings.scrape_seconds)
        self._policy = Policy(budget=parse_budget(settings.cordon_budget))
        self._scraper = Scraper(timeout=settings.scrape_timeout_seconds, clock=clock)
        self._metrics = HealthMetrics()
        self._memories: dict[str, NodeMemory] = {}
        self._died_at: dict[str, float] = {}
        self._decided_at: dict[str, float] = {}
        self._fleet = release.FleetMemory()
        self._targets: dict[str, Target] = {}
        self._listed_at: float | None = None
        self._published: Mapping[str, NodeVerdict] = {}
        self._said: dict[str, str] = {}
        self._told: set[Tell] = set()
        self._facts: dict[str, NodeFacts] = {}
        self._woken = asyncio.Event()
        self._looked = asyncio.Event()
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        while not self._world.ready:  # noqa: ASYNC110 the world has no event for it
            await asyncio.sleep(0.1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._scrape_for_ever())
                group.create_task(self._pass_for_ever())
        finally:
            await self._scraper.close()

    def quarantine_deleted(self, quarantine: Mapping[str, Any]) -> None:
        """Seen alive until now, even if it came and went between two passes."""
        try:
            known = to_quarantine(quarantine)
        except QuarantineError as error:
            log.warning("%s", error)
        else:
            self._fleet = release.with_deleted(self._fleet, known)
        self.wake()

    def wake(self) -> None:
        self._woken.set()

    def rank_died(self, node: str) -> None:
        memory = self._memories.get(node)
        if memory is None or memory.last_good is None:
            return
        self._died_at[node] = self._clock()
        self._publish_now()
        self.wake()

    def render_metrics(self) -> str:
        return self._metrics.render()

    async def _scrape_for_ever(self) -> None:
        interval = self._settings.scrape_seconds
        due = time.monotonic()
        while True:
            try:
                await self.scrape_once()
            except kube.KubeError as error:
                self._say("exporters", f"the exporter pods cannot be listed: {error.message}")
            except Exception:  # the loop's edge: a fault in one round must not end all others
                log.exception("a round of scrapes failed")
            self._looked.set()
            self.wake()
            due = max(due + interval, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _pass_for_ever(self) -> None:
        await self._looked.wait()  # what nobody has looked at yet must not pass for sound
        while True:
            wake_after = await self._pass_safely()
            try:
                async with asyncio.timeout(wake_after):
                    await self._woken.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(WAKE_PAUSE)
            self._woken.clear()

    async def _pass_safely(self) -> float:
        """Seconds after which to look again."""
        try:
            return await self.pass_once()
        except kube.KubeError as error:
            self._say("fleet", f"{type(error).__name__}: {error.message}")
        except Exception:  # the loop's edge: see _scrape_for_ever
            log.exception("a fleet pass failed")
        return self._settings.scrape_seconds

    async def scrape_once(self) -> None:
        """One round over all exporters; the memory of what they said is the result."""
        await self._find_targets()
        nodes = self._nodes()
        scrapes = await self._scraper.scrape_all(self._targets.values())
        scrapes += self._absences(nodes)
        for scrape in scrapes:
            facts = nodes.get(scrape.node)
            if facts is not None:
                held = self._memories.get(scrape.node, NodeMemory())
                self._memories[scrape.node] = remember(held, scrape, facts, self._limits)
        for gone in set(self._memories) - set(nodes):
            del self._memories[gone]
        if any(isinstance(scrape.outcome, ScrapeFailure) for scrape in scrapes):
            self._listed_at = None
        self._metrics.note_scrapes(scrapes, watched=len(self._targets))
        ages = {name: memory.last_good for name, memory in self._memories.items()}
        self._metrics.note_ages(ages, self._clock)

    async def _find_targets(self) -> None:
        now = time.monotonic()
        if self._listed_at is not None and now - self._listed_at < RELIST_SECONDS:
            return
        pods, _ = await self._kube.list(kube.PODS, labels=self._settings.exporter_selector)
        self._targets = choose_targets(pods, port=self._settings.exporter_port)
        self._said.pop("exporters", None)
        all_watched = all(
            node.name in self._targets for node in self._nodes().values() if node.has_gpus
        )
        self._listed_at = now if all_watched and self._targets else None

    def _absences(self, nodes: Mapping[str, NodeFacts]) -> list[Scrape]:
        """A node that had an exporter and has none now is as silent as one whose exporter
        refuses."""
        return [
            Scrape(
                node=name,
                started=self._clock(),
                seconds=0.0,
                outcome=ScrapeFailure(
                    kind=FailureKind.ABSENT, message="there is no dcgm-exporter pod on the node"
                ),
            )
            for name in self._memories
            if name not in self._targets and name in nodes
        ]

    async def pass_once(self) -> float:
        """Passes until the plan is empty. Raises `kube.KubeError`."""
        async with self._lock:
            begun = time.monotonic()
            done: list[str] = []
            for _ in range(PASS_ROUNDS):
                now = self._clock()
                observed = await self._observe(now)
                planned = self._plan(observed, now)
                self._fleet = planned.memory
                self._publish(observed.nodes, observed.findings, now)
                actions = self._without_repeats(planned.actions)
                outcome = await apply.apply_plan(self._nodes_port, actions, now, self._kube)
                done += outcome.done
                for node in outcome.nodes:
                    self._world.nodes.put(node)
                if not set(outcome.done) - {"Tell"} and not outcome.again:
                    break
                if outcome.again:
                    await asyncio.sleep(WAKE_PAUSE)
            self._said.pop("fleet", None)
            self._metrics.note_pass(observed, self._policy, done, time.monotonic() - begun)
        if outcome.again:
            return AGAIN_SECONDS
        return planned.wake_after or self._settings.scrape_seconds

    def _plan(self, observed: Observed, now: float) -> Plan:
        if self._settings.observe_only:
            return plan_observing(observed, self._fleet, self._policy, now)
        return plan(observed, self._fleet, self._policy, now)

    def _nodes(self) -> dict[str, NodeFacts]:
        """By name. What has not changed is not read again: annotations are costly to decode."""
        held, self._facts = self._facts, {}
        for node in self._world.nodes:
            facts = held.get(node["metadata"]["name"])
            if facts is None or facts.version != node["metadata"].get("resourceVersion", ""):
                facts = to_facts(node)
            self._facts[facts.name] = facts
        return dict(self._facts)

    async def _observe(self, now: float) -> Observed:
        nodes = self._nodes()
        listed, unreadable = await self._list_quarantines()
        creatable = True
        if listed is not None and release.find_absent(nodes, listed, self._fleet):
            creatable = await self._is_creatable()
        return Observed(
            nodes=nodes,
            quarantines=listed,
            unreadable=unreadable,
            creatable=creatable,
            findings=self._find(nodes, now),
        )

    async def _list_quarantines(self) -> tuple[tuple[Quarantine, ...] | None, str]:
        """Straight from the API server: whether one is absent must not be judged by a stale
        mirror."""
        try:
            objects, _ = await self._kube.list(kube.QUARANTINES)
        except kube.KubeError as error:
            return None, f"{type(error).__name__}: {error.message}"
        listed = []
        for obj in objects:
            try:
                listed.append(to_quarantine(obj))
            except QuarantineError as error:
                self._say(f"quarantine {obj['metadata']['name']}", f"cannot be read: {error}")
        return tuple(listed), ""

    async def _is_creatable(self) -> bool:
        """While a CRD is being deleted its objects vanish one by one, and none can be created."""
        probe = build_object(release.build_probe(self._clock()))
        try:
            await self._nodes_port.create(kube.QUARANTINES, probe, dry_run=True)
        except kube.AlreadyExists:
            return True
        except kube.KubeError as error:
            self._say("probe", f"no NodeQuarantine could be created now: {error.message}")
            return False
        self._said.pop("probe", None)
        return True

    def _find(self, nodes: Mapping[str, NodeFacts], now: float) -> dict[str, Finding]:
        return {
            name: decide_node(
                memory,
                nodes[name],
                table=self._table,
                limits=self._limits,
                now=now,
                died_at=self._died_at.get(name),
            )
            for name, memory in self._memories.items()
            if name in nodes
        }

    def _publish_now(self) -> None:
        nodes, now = self._nodes(), self._clock()
        self._publish(nodes, self._find(nodes, now), now)

    def _publish(
        self, nodes: Mapping[str, NodeFacts], findings: Mapping[str, Finding], now: float
    ) -> None:
        """A quarantine that is absent binds its node until its release, or its return, is decided."""
        standing = self._fleet.alive.values()
        verdicts = choose_verdicts(nodes, findings, standing, self._decided_at, now)
        for verdict in verdicts.values():
            if "verdict" in verdict.marks:
                self._decided_at.setdefault(verdict.incident, verdict.marks["verdict"])
        self._metrics.note_verdicts(verdicts)
        for node in sorted(set(verdicts) | set(self._published)):
            self._say_verdict(node, self._published.get(node), verdicts.get(node))
        self._published = verdicts
        self._verdicts.publish(verdicts)

    def _say_verdict(self, node: str, old: NodeVerdict | None, new: NodeVerdict | None) -> None:
        if new is None:
            log.info("node %s: no verdict any more (was %s)", node, old.state.value if old else "")
        elif old is None or old.state is not new.state or old.incident != new.incident:
            text = f"{new.state.value}: {new.reason}: {new.message}"
            log.warning("%s%s", text, f" [{new.incident}]" if new.incident else "")

    def _without_repeats(self, actions: Iterable[Action]) -> list[Action]:
        """What was told in the last pass as well need not be told again."""
        actions = list(actions)
        told, self._told = self._told, {a for a in actions if isinstance(a, Tell)}
        return [action for action in actions if not isinstance(action, Tell) or action not in told]

    def _say(self, about: str, text: str) -> None:
        """Repeated words are logged once."""
        if self._said.get(about) != text:
            self._said[about] = text
            log.warning("%s: %s", about, text)

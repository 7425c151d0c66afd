"""The loop: scrape, remember, decide, publish, apply. `replica` starts it, `handlers` wakes it.

At every interval all exporters are scraped. After that, and whenever a node or a NodeQuarantine
changes, fleet passes run until the plan is empty. Nothing in this process's memory is needed
for correctness: lasting state is on nodes and in NodeQuarantines.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from everstep_operator import kube
from everstep_operator.fleet.budget import parse_budget
from everstep_operator.fleet.observed import Policy
from everstep_operator.fleet.passes import FleetPasses
from everstep_operator.health.examiner import Examiner
from everstep_operator.health.exporters import Exporters
from everstep_operator.health.metrics import HealthMetrics
from everstep_operator.health.publisher import Publisher, Sources
from everstep_operator.health.rules.registry import load_rules
from everstep_operator.health.signals import build_limits
from everstep_operator.health.starts import StartFailures
from everstep_operator.health_seam import Verdicts
from everstep_operator.kube import Kube
from everstep_operator.logs import OnChange
from everstep_operator.roster import LiveRoster, Roster
from everstep_operator.settings import Settings
from everstep_operator.world import Key, World

log = logging.getLogger(__name__)

PASS_ROUNDS = 12
"""Limit of consecutive passes: create, mark, status and release need five."""
AGAIN_SECONDS = 1.0
"""Pause after a conflict that the mirrors do not show yet: perhaps nothing else wakes the loop."""
WAKE_PAUSE = 0.05
"""Collects changes that come together."""


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
        self._world, self._settings, self._clock = world, settings, clock
        self._roster = LiveRoster(world.nodes)
        self._said = OnChange(log)
        self._policy = Policy(
            budget=parse_budget(settings.cordon_budget), observe_only=settings.observe_only
        )
        self._metrics = HealthMetrics()
        rules = load_rules()
        self._exporters = Exporters(kube, settings, rules.metrics, self._said, clock)
        self._examiner = Examiner(rules, build_limits(settings.scrape_seconds))
        self._start_failures = StartFailures()
        self._sources = Sources(
            roster=self._roster, examiner=self._examiner, start_failures=self._start_failures
        )
        self._publisher = Publisher(verdicts, self._metrics)
        self._fleet = FleetPasses(kube, nodes or kube, self._policy, self._said, clock)
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
            await self.close()

    async def close(self) -> None:
        await self._exporters.close()

    def quarantine_deleted(self, quarantine: Mapping[str, Any]) -> None:
        self._fleet.note_deleted(quarantine)
        self.wake()

    def wake(self) -> None:
        self._woken.set()

    def rank_died(self, node: str) -> None:
        now = self._clock()
        if self._examiner.note_death(node, now):
            roster = self._refresh(now)
            self._examiner.examine([node], roster.nodes, now)
            self._publish(now)
            self.wake()

    def starts_failed(self, job: Key, nodes: Mapping[str, int]) -> None:
        if self._start_failures.note(job, nodes):
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
                self._said.say("exporters", f"the exporter pods cannot be listed: {error.message}")
            except Exception:  # the outer edge: one failing round must not end all others
                log.exception("a round of scrapes failed")
            self._looked.set()
            self.wake()
            due = max(due + interval, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    async def _pass_for_ever(self) -> None:
        await self._looked.wait()  # a node that has not been examined must not count as healthy
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
        """Run the passes, log their failure; return the seconds until the next passes."""
        try:
            return await self.pass_once()
        except kube.KubeError as error:
            self._said.say("fleet", f"{type(error).__name__}: {error.message}")
        except Exception:  # the outer edge: see _scrape_for_ever
            log.exception("a fleet pass failed")
        return self._settings.scrape_seconds

    async def scrape_once(self) -> None:
        """One round over all exporters. Raises `kube.KubeError` if they cannot be listed."""
        examiner, metrics = self._examiner, self._metrics
        try:
            known = list(examiner.memories)
            scrapes = await self._exporters.read(self._refresh(self._clock()), known)
            heard = examiner.hear(scrapes, self._roster.now.nodes)
            metrics.note_scrapes(heard, watched=self._exporters.count_watched(self._roster.now))
        finally:
            examiner.examine_all(self._roster.now.nodes, self._clock())
        ages = {name: memory.last_good for name, memory in examiner.memories.items()}
        metrics.note_ages(ages, self._clock)

    async def pass_once(self) -> float:
        """Run passes until the plan is empty; return the seconds until the next passes.

        Raises `kube.KubeError`.
        """
        async with self._lock:
            begun = time.monotonic()
            done: list[str] = []
            for _ in range(PASS_ROUNDS):
                now = self._clock()
                observed = await self._fleet.observe(self._refresh(now), self._examiner.findings)
                planned = self._fleet.plan(observed, now)
                self._publish(now)
                outcome = await self._fleet.apply(planned, now)
                done += outcome.done
                for node in outcome.nodes:
                    self._world.nodes.put(node)
                if not set(outcome.done) - {"Tell"} and not outcome.again:
                    break
                if outcome.again:
                    await asyncio.sleep(WAKE_PAUSE)
            self._said.forget("fleet")
            self._metrics.note_pass(observed, self._policy, done, time.monotonic() - begun)
        if outcome.again:
            return AGAIN_SECONDS
        return planned.wake_after or self._settings.scrape_seconds

    def _refresh(self, now: float) -> Roster:
        changed = self._roster.refresh()
        self._examiner.examine(changed, self._roster.now.nodes, now)
        return self._roster.now

    def _publish(self, now: float) -> None:
        if self._fleet.planned:
            self._publisher.publish(self._sources, self._fleet.memory, now)

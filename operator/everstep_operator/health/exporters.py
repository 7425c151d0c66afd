"""Finds the exporters and reads one page of each: the only reads of `health` besides the watches."""

import itertools
import time
from collections.abc import Callable, Iterable

from everstep_operator import kube
from everstep_operator.health.outcomes import Scrape, ScrapeFailure
from everstep_operator.health.parse import Metrics
from everstep_operator.health.scrape import Scraper
from everstep_operator.health.targets import (
    Targets,
    build_failures,
    choose_targets,
    refuse_foreign,
)
from everstep_operator.kube import Kube, Object
from everstep_operator.logs import OnChange
from everstep_operator.roster import Roster
from everstep_operator.settings import Settings

RELIST_SECONDS = 60.0
"""Exporter pods rarely move; a failed scrape lists them at once."""
SHOWN = 5
"""How many untrusted exporters the log names: any user can create such pods."""


class Exporters:
    def __init__(
        self,
        port: Kube,
        settings: Settings,
        metrics: Metrics,
        said: OnChange,
        clock: Callable[[], float],
    ) -> None:
        """`metrics`: what is read from each page."""
        self._port, self._settings, self._said, self._clock = port, settings, said, clock
        self._scraper = Scraper(
            timeout=settings.scrape_timeout_seconds, clock=clock, metrics=metrics
        )
        self._targets = Targets(by_node={}, contested={}, strangers=())
        self._listed_at: float | None = None
        self._pods: dict[tuple[str, str], list[Object]] = {}
        """(namespace, labels) → pods, of the lists that are not complete yet."""
        self._known: dict[tuple[str, str], list[Object]] = {}
        """The same of the last lists that succeeded."""
        self._began = 0.0
        """When the first of them was made."""

    def count_watched(self, roster: Roster) -> int:
        """How many GPU nodes have an exporter."""
        named = (roster.nodes.get(name) for name in self._targets.by_node)
        return sum(node is not None and node.has_gpus for node in named)

    async def close(self) -> None:
        await self._scraper.close()

    async def read(self, roster: Roster, known: Iterable[str]) -> list[Scrape]:
        """Scrape each exporter once; add a failure for each `known` node that has none.

        Raises `kube.KubeError` if no exporter is known.
        """
        try:
            await self._find(roster)
        except kube.KubeError as error:
            if not self._targets.by_node:
                raise
            said = f"the exporter pods cannot be listed, the known ones are read: {error.message}"
            self._said.say("exporters", said)
        found = await self._scraper.scrape_all(self._targets.by_node.values())
        scrapes = [refuse_foreign(scrape, roster.nodes) for scrape in found]
        scrapes += build_failures(self._targets, known, self._clock())
        if any(isinstance(scrape.outcome, ScrapeFailure) for scrape in scrapes):
            self.list_anew()
        return scrapes

    def list_anew(self) -> None:
        self._listed_at = None

    async def _find(self, roster: Roster) -> None:
        now = time.monotonic()
        if self._listed_at is not None and now - self._listed_at < RELIST_SECONDS:
            return
        settings = self._settings
        self._targets = choose_targets(
            await self._list(now),
            namespaces=settings.exporter_namespace_list,
            port=settings.exporter_port,
        )
        self._said.forget("exporters")
        if self._targets.strangers:
            shown = "; ".join(self._targets.strangers[:SHOWN])
            self._said.say("exporters that are not accepted", shown)
        watched = self._targets.by_node
        all_watched = all(n.name in watched for n in roster.nodes.values() if n.has_gpus)
        self._listed_at = now if all_watched and watched else None

    async def _list(self, now: float) -> list[Object]:
        """List the exporter pods. If some lists fail, the next call repeats only those: an API server
        that refuses every other request must not hide all exporters. Nor must a namespace in which
        the right to list is missing: of it, those are used that are known.

        Raises `kube.KubeError`.
        """
        if now - self._began >= RELIST_SECONDS:
            self._began, self._pods = now, {}
        settings, failed = self._settings, list[kube.KubeError]()
        keys = itertools.product(settings.exporter_namespace_list, settings.exporter_selector_list)
        for namespace, labels in (every := list(keys)):
            if (namespace, labels) in self._pods:
                continue
            try:
                found, _ = await self._port.list(kube.PODS, namespace, labels=labels)
            except kube.KubeError as error:
                failed.append(error)
                if error.status == 403:
                    self._said.say(
                        f"exporters in {namespace}", f"not allowed to list: {error.message}"
                    )
            else:
                self._pods[namespace, labels] = found
                self._said.forget(f"exporters in {namespace}")
        lasting = [error for error in failed if error.status != 403 or not self._pods]
        if lasting:
            raise lasting[0]
        self._known |= self._pods
        self._pods = {}
        return [pod for key in every for pod in self._known.get(key, ())]

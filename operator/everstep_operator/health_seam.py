"""What `handlers` expects of the health and fleet loop, and what it gives to it."""

from collections.abc import Mapping
from typing import Any, Protocol

from everstep_operator.values import NodeVerdict


class Verdicts(Protocol):
    """Where the loop puts its verdicts: the whole mapping each time, jobs concerned are woken by the receiver."""

    def publish(self, verdicts: Mapping[str, NodeVerdict]) -> None: ...


class HealthLoop(Protocol):
    """`everstep_operator.health.loop.HealthLoop(kube=…, world=…, settings=…, verdicts=…)`.

    `kube` is the `kube.Kube`, `world` the `world.World` (wait for `world.ready`), `settings` the `settings.Settings`.
    Exporter pods are no part of the world: list them through `kube.list(PODS, labels=settings.exporter_selector)`.
    """

    async def run(self) -> None:
        """Until cancelled; survives every failure of a scrape or a write."""

    def quarantine_deleted(self, quarantine: Mapping[str, Any]) -> None:
        """A watch saw this NodeQuarantine being deleted: that releases its node."""

    def wake(self) -> None:
        """A node or a NodeQuarantine has changed: run the fleet pass soon."""

    def rank_died(self, node: str) -> None:
        """A rank or container on this node just died: the node is SUSPECT (published at once) until a scrape that was
        sampled later shows all its GPUs, or a limit passes. For nodes that no exporter watches nothing happens."""

    def render_metrics(self) -> str:
        """Prometheus text, appended to the operator's own; "" for none."""

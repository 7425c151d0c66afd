"""The interface between `handlers` and the health and fleet loop, and its replacement if health is
disabled.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from everstep_operator.values import NodeVerdict


class Verdicts(Protocol):
    """Where the loop publishes its verdicts: the whole mapping each time; the receiver wakes the
    jobs concerned.
    """

    def publish(self, verdicts: Mapping[str, NodeVerdict], judged_at: Mapping[str, float]) -> None:
        """`judged_at`: node → earliest sampling time (monotonic clock) of the newest page on which
        these verdicts are based; only nodes whose GPUs are watched.
        """


class HealthLoop(Protocol):
    """`everstep_operator.health.loop.HealthLoop(kube=…, world=…, settings=…, verdicts=…)`.

    `kube` is the `kube.Kube`, `world` the `world.World` (wait for `world.ready`), `settings`
    the `settings.Settings`. Exporter pods are not part of the world: the loop lists them
    through `kube`, in the exporters' namespaces.
    """

    async def run(self) -> None:
        """Runs until cancelled; survives every failed scrape or write."""

    def quarantine_deleted(self, quarantine: Mapping[str, Any]) -> None:
        """A watch saw this NodeQuarantine being deleted, which releases its node."""

    def wake(self) -> None:
        """A node or a NodeQuarantine has changed: run the fleet pass soon."""

    def rank_died(self, node: str) -> None:
        """A rank or container on this node has died: the node is SUSPECT (published at once) until
        a page sampled later shows all its GPUs, or a limit passes. No effect on nodes without an
        exporter.
        """

    def starts_failed(self, job: tuple[str, str], nodes: Mapping[str, int]) -> None:
        """On each of these nodes, pods of so many slots of this job failed to start within the last
        hour: the kubelet rejected them, or they were not ready within `startupSeconds`. A level
        that replaces the job's earlier record; empty: none (any more), also when the job is over.
        Failures caused by the template (an image that cannot be pulled, a missing Secret) are left
        out. Two slots on one node, of one job or of two, are a signal about the node.
        """

    def render_metrics(self) -> str:
        """Prometheus text, appended to the operator's own; "" for none."""


class NoHealth:
    """A `HealthLoop` that judges no node (`--health=false`): there are no verdicts, and nothing
    waits for one.
    """

    def __init__(self, verdicts: Verdicts) -> None:
        self._verdicts = verdicts

    async def run(self) -> None:
        self._verdicts.publish({}, {})
        await asyncio.Event().wait()

    def quarantine_deleted(self, quarantine: Mapping[str, Any]) -> None:
        pass

    def wake(self) -> None:
        pass

    def rank_died(self, node: str) -> None:
        pass

    def starts_failed(self, job: tuple[str, str], nodes: Mapping[str, int]) -> None:
        pass

    def render_metrics(self) -> str:
        return ""

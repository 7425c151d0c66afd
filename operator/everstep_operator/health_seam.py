"""The interface between `handlers` and the health and fleet loop, and the loop's replacement if
health is disabled.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from everstep_operator.values import NodeVerdict


class Verdicts(Protocol):
    """Where the loop publishes its verdicts. Each call passes the complete mapping; the receiver
    wakes the jobs concerned.
    """

    def publish(self, verdicts: Mapping[str, NodeVerdict], judged_at: Mapping[str, float]) -> None:
        """`judged_at`: node → the earliest time (monotonic clock) at which the values behind its
        verdict were sampled. It contains only nodes whose GPUs are watched.
        """


class HealthLoop(Protocol):
    """`everstep_operator.health.loop.HealthLoop(kube=…, world=…, settings=…, verdicts=…)`.

    `kube` is the `kube.Kube`, `world` the `world.World` (wait for `world.ready`), `settings`
    the `settings.Settings`. Exporter pods are not part of the world: the loop lists them
    through `kube`, in the exporters' namespaces.
    """

    async def run(self) -> None:
        """Run until cancelled; failed scrapes and writes do not end it."""

    def quarantine_deleted(self, quarantine: Mapping[str, Any]) -> None:
        """A watch saw this NodeQuarantine being deleted, which releases its node."""

    def wake(self) -> None:
        """A node or a NodeQuarantine has changed: run the fleet pass soon."""

    def rank_died(self, node: str) -> None:
        """A rank or container on this node has died: the node is SUSPECT (published at once) until
        a page sampled later shows all its GPUs, or a time limit has passed. This has no effect on
        nodes without an exporter.
        """

    def starts_failed(self, job: tuple[str, str], nodes: Mapping[str, int]) -> None:
        """`nodes`: node → the number of this job's slots whose pods failed to start there within
        the last hour.

        A pod failed to start if the kubelet rejected it, or if it was not ready within
        `startupSeconds`. Failures caused by the template (an image that cannot be pulled, a missing
        Secret) are left out. The mapping is a level that replaces the job's earlier one. It is
        empty if there are no failures (any more), and when the job is over. Two slots on one node,
        of one job or of two, are a signal about the node.
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

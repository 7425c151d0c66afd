"""Lists the leases that kubelets renew, and wakes the jobs on nodes that have become silent or are
no longer silent.

The leases are listed every few seconds, not watched: a watch would deliver every renewal of every
node, and kopf would need the right to watch the leases of all namespaces. A standby lists them,
too, so that a new leader knows how long a node has been silent.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep_operator import kube
from everstep_operator.kube import Kube
from everstep_operator.silence import Silence
from everstep_operator.world import Key, World

NAMESPACE = "kube-node-lease"
LIST_SECONDS = 3.0
DENIED_SECONDS = 60.0
"""Until the next attempt if the operator has no right to list leases."""
DENIED = (
    "node leases cannot be listed, so a silent node is given up only after recovery.nodeLostSeconds, and "
    "recovery.replaceAfterSeconds has no effect: upgrade the chart, whose Role everstep-node-leases allows "
    f"to list leases in {NAMESPACE} (%s)"
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeLeases:
    port: Kube
    world: World
    wake: Callable[[Key], None]
    """Called with the key of each job that a node's silence, or the end of it, concerns."""
    clock: Callable[[], float] = time.monotonic
    _silence: Silence = field(default_factory=Silence)
    _denied: bool = False

    def list_silent(self) -> dict[str, float]:
        """Node → seconds for which its lease has not been renewed while others were."""
        return self._silence.list_silent(self.clock())

    async def run(self) -> None:
        while True:
            pause = await self.turn()
            await asyncio.sleep(pause)

    async def turn(self) -> float:
        """List the leases once; return the seconds until the next list is due."""
        if not len(self.world.pods):
            return LIST_SECONDS
        try:
            leases, _ = await self.port.list(kube.LEASES, NAMESPACE)
        except kube.Denied as error:
            if not self._denied:
                log.warning(DENIED, error.message)
            self._denied = True
            return DENIED_SECONDS
        except kube.KubeError as error:
            log.debug("node leases: %s", error)
            return max(LIST_SECONDS, error.retry_after)
        self._denied = False
        before = self.list_silent().keys()
        self._silence.note(leases, self.clock())
        self._wake_concerned(before ^ self.list_silent().keys())
        return LIST_SECONDS

    def _wake_concerned(self, nodes: set[str]) -> None:
        """Wake the jobs with a pod on one of these nodes, and those with a waiting pod that
        excludes one: that pod may have to be recreated.
        """
        for key in self.world.jobs_on(nodes) | self.world.jobs_shutting_out(nodes):
            self.wake(key)

"""Full lists: at start, when the lease is taken, soon after a watch had to begin anew, and every few
minutes beside the watches.
"""

import asyncio
import logging
from contextlib import suppress

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.handlers import Watchers
from everstep_operator.kube import Kube
from everstep_operator.world import Mirror, World

RETRY_SECONDS = 2.0
SETTLE_SECONDS = 1.0
"""The watches of all kinds begin anew at about the same time."""

log = logging.getLogger(__name__)


async def resync(port: Kube, world: World, watchers: Watchers) -> None:
    """Lists every kind once; until that has worked there is no pass."""
    done = False
    while not done:
        try:
            await _list_all(port, world, watchers)
            done = True
        except kube.KubeError as error:
            log.warning("cannot list yet: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
    world.ready = True
    watchers.wake_all()


async def resync_forever(port: Kube, world: World, watchers: Watchers, seconds: float) -> None:
    """After each list every job is looked at: what changed without an event has woken nobody."""
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(watchers.listed.wait(), seconds)
            await asyncio.sleep(SETTLE_SECONDS)
        watchers.listed.clear()
        try:
            await _list_all(port, world, watchers)
        except kube.KubeError as error:
            log.warning("full lists failed, the watches go on: %s", error)
        watchers.wake_all()


async def _list_all(port: Kube, world: World, watchers: Watchers) -> None:
    listed: tuple[tuple[kube.Kind, Mirror, str], ...] = (
        (kube.JOBS, world.jobs, ""),
        (kube.PODS, world.pods, names.LABEL_JOB),
        (kube.NODES, world.nodes, ""),
        (kube.QUARANTINES, world.quarantines, ""),
    )
    for kind, mirror, labels in listed:
        items, version = await port.list(kind, labels=labels)
        lost = mirror.replace(items, version)
        if lost:
            log.warning("%d %s had gone without an event", len(lost), kind.plural)

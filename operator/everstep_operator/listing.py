"""Full lists, in addition to the watches: at start, when the lease is taken, soon after a watch
restarts, and every few minutes.
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
LONGEST_RETRY_SECONDS = 60.0
SETTLE_SECONDS = 1.0
"""How long a list waits after a watch restarted: the watches of all kinds restart at about the same
time, and one list serves them all.
"""

Namespaces = tuple[str | None, ...]
"""None: the whole cluster."""

log = logging.getLogger(__name__)


async def resync(port: Kube, world: World, watchers: Watchers) -> None:
    """List every kind once; retry until it succeeds. No pass runs before that."""
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
    """List everything every `seconds`, or soon after a watch restarted.

    After each list every job gets a pass: a change without an event has woken none. A list that fails
    is soon tried again: what it would have corrected must not wait for the next one.
    """
    said, pause = "", RETRY_SECONDS
    while True:
        with suppress(TimeoutError):
            await asyncio.wait_for(watchers.listed.wait(), seconds)
            await asyncio.sleep(SETTLE_SECONDS)
        watchers.listed.clear()
        try:
            await _list_all(port, world, watchers)
        except kube.KubeError as error:
            if said != str(error):
                log.warning("full lists failed, the watches go on: %s", error)
            said = str(error)
            watchers.listed.set()
            await asyncio.sleep(max(pause, error.retry_after))
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)
        else:
            said, pause = "", RETRY_SECONDS
            watchers.wake_all()


async def _list_all(port: Kube, world: World, watchers: Watchers) -> None:
    scope = world.scope
    namespaces: Namespaces = scope.namespaces or (None,)
    await _list_kind(port, kube.JOBS, world.jobs, namespaces)
    await _list_kind(port, kube.PODS, world.pods, namespaces, names.LABEL_JOB)
    if scope.nodes:
        await _list_kind(port, kube.NODES, world.nodes)
        await _list_kind(port, kube.QUARANTINES, world.quarantines)


async def _list_kind(
    port: Kube, kind: kube.Kind, mirror: Mirror, namespaces: Namespaces = (None,), labels: str = ""
) -> None:
    """List one kind. Objects newer than the oldest of the lists are kept: that list could not
    contain them.
    """
    found, versions = [], []
    for namespace in namespaces:
        items, version = await port.list(kind, namespace, labels=labels)
        found += items
        versions.append(version)
    lost = mirror.replace(found, min(versions, key=_number))
    if lost:
        log.warning("%d %s had vanished without an event", len(lost), kind.plural)


def _number(version: str) -> int:
    return int(version) if version.isdigit() else 0

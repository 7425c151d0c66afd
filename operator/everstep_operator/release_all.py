"""`everstep-operator release-all`: undoes all changes to nodes, before an uninstall.

It needs no running operator, and stops one that runs: with --lease it first takes the Lease from
its holder and waits until that holder can no longer write. It does not release the Lease at the
end, so that the operator stays inactive for another half a minute, while it is being deleted.
"""

import asyncio
import logging
from collections.abc import Collection

from everstep_operator import kube
from everstep_operator.election import Leadership
from everstep_operator.fleet.leaving import plan_undoing
from everstep_operator.kube import Kube
from everstep_operator.nodes import to_facts
from everstep_operator.quarantines import Quarantine, QuarantineError, to_quarantine

TRIES = 5
PAUSE_SECONDS = 0.5

log = logging.getLogger(__name__)


class NotReleased(Exception):
    """Some of Everstep's changes remain; the text says which, why, and what to do."""


async def run(port: Kube, nodes: Kube, leadership: Leadership) -> int:
    """Return 0 when none of Everstep's changes remain. Read through `port`, write through `nodes`.

    Raises `NotReleased`.
    """
    port.seconds_left = nodes.seconds_left = leadership.seconds_left
    try:
        await leadership.seize()
        keeping = asyncio.create_task(leadership.run())
        try:
            return await _release(port, nodes)
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
    except kube.KubeError as error:
        raise NotReleased(_explain(error)) from error


async def _release(port: Kube, nodes: Kube) -> int:
    quarantines = await _list_quarantines(port)
    found, _ = await port.list(kube.NODES)
    known = [q for obj in quarantines if (q := _read(obj)) is not None]
    released, refused = [], dict[str, kube.KubeError]()
    for obj in found:
        try:
            released.append(await _release_node(port, nodes, obj, known))
        except (kube.Denied, kube.Invalid, kube.Transient) as error:
            if isinstance(error, kube.Transient) and not kube.has_failed_webhook(error):
                raise
            name = obj["metadata"]["name"]
            log.warning("node %s is not released: %s", name, error.message)
            refused[name] = error
    if refused:
        raise NotReleased(_explain(next(iter(refused.values())), nodes=refused))
    for obj in quarantines:
        await _delete(nodes, obj)
    counts = f"{sum(released)} of {len(found)} nodes released, {len(quarantines)} NodeQuarantines"
    log.info("%s deleted", counts if any(released) or quarantines else f"nothing to do: {counts}")
    return 0


async def _release_node(port: Kube, nodes: Kube, obj: kube.Object, known: list[Quarantine]) -> bool:
    """Release one node; return whether there was something to undo. A node that changes in the
    meantime is read again.
    """
    name = obj["metadata"]["name"]
    for _ in range(TRIES):
        undoing = plan_undoing(obj, to_facts(obj), known)
        if undoing is None:
            return False
        try:
            await nodes.patch(kube.NODES, name, undoing.body)
        except kube.Conflict:
            found, _ = await port.list(kube.NODES, fields=f"metadata.name={name}")
            if not found:
                return False
            obj = found[0]
            await asyncio.sleep(PAUSE_SECONDS)
        except kube.Gone:
            return False
        else:
            log.info("%s", undoing.message)
            return True
    raise NotReleased(
        f"node {name} was changed by others {TRIES} times in the meantime: run it again"
    )


async def _list_quarantines(port: Kube) -> list[kube.Object]:
    try:
        found, _ = await port.list(kube.QUARANTINES)
    except kube.Gone:
        log.info(
            "the CRD of NodeQuarantines is not installed: only the marks on nodes are looked for"
        )
        return []
    return found


def _read(obj: kube.Object) -> Quarantine | None:
    try:
        return to_quarantine(obj)
    except QuarantineError as error:
        log.warning("%s", error)
        return None


async def _delete(nodes: Kube, obj: kube.Object) -> None:
    name = obj["metadata"]["name"]
    try:
        await nodes.delete(kube.QUARANTINES, name, uid=obj["metadata"]["uid"])
    except (kube.Gone, kube.Conflict):
        return
    log.info("NodeQuarantine %s: deleted", name)


def _explain(error: kube.KubeError, nodes: Collection[str] = ()) -> str:
    """`nodes`: those that are not released; the API server's message does not always name one."""
    advice = {
        kube.Denied: "grant the rights that charts/everstep/README.md lists, or undo by hand",
        kube.Transient: "try again when the API server answers",
        kube.Standby: "another process took the Lease in the meantime: try again",
    }.get(type(error), "see the message")
    which = f" (nodes: {', '.join(list(nodes)[:20])})" if nodes else ""
    return (
        f"not everything is released{which}: {error.message}. What to do: {advice}. By hand: "
        "kubectl delete nodequarantines --all; kubectl uncordon NODE; "
        "kubectl taint node NODE everstep.dev/quarantine-; "
        "kubectl annotate node NODE everstep.dev/cordoned-by-"
    )

"""Namespaces of `watchNamespaces` that the operator may not list, at least for now.

The operator's Role in a namespace is deleted with that namespace. The jobs of the other namespaces must not
wait for it, and kopf ends if one of its watches is refused.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace

from everstep_operator import kube
from everstep_operator.kube import Kube
from everstep_operator.world import World

LEFT_OUT_SECONDS = 30.0

log = logging.getLogger(__name__)


class NamespaceBack(Exception):
    """A namespace that was left out may be listed again."""


async def leave_out_denied(port: Kube, world: World) -> tuple[str, ...]:
    """Leave the namespaces that may not be listed out of the world's scope, and return them.

    If no namespace may be listed, none is left out: the full list then says what is refused.
    """
    denied = {}
    for namespace in world.scope.namespaces:
        try:
            await port.list(kube.JOBS, namespace)
        except kube.Denied as error:
            denied[namespace] = error.message
        except kube.KubeError:
            continue  # the full list tries it again
    kept = tuple(n for n in world.scope.namespaces if n not in denied)
    if not kept:
        return ()
    for namespace, message in denied.items():
        log.error(
            "the jobs of namespace %s are not managed, because they may not be listed: %s. If the "
            "namespace was deleted, remove it from watchNamespaces; if it exists, run helm upgrade, "
            "which creates the operator's Role there",
            namespace, message,
        )  # fmt: skip
    world.scope = replace(world.scope, namespaces=kept)
    return tuple(denied)


async def watch_left_out(port: Kube, namespaces: tuple[str, ...]) -> None:
    """Raise NamespaceBack once the jobs of one of these namespaces may be listed."""
    while True:
        await asyncio.sleep(LEFT_OUT_SECONDS)
        for namespace in namespaces:
            with suppress(kube.KubeError):
                await port.list(kube.JOBS, namespace)
                raise NamespaceBack(
                    f"the jobs of namespace {namespace} may be listed again, and a new process watches them"
                )

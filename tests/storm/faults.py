"""What the storm does to a job: one function for each kind of strike."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from everstep_contract import levels, report
from storm.cluster import Cluster
from storm.ground import Gate
from storm.plan import HURTS, Strike
from storm.pods import Pod
from storm.wish import HANG_SECONDS

BY_NOW = 120.0
"""How long the job may take to react to a strike."""
ZOMBIE_SECONDS = 60.0
"""How long a pod that was declared gone may take to notice that and end."""


@dataclass(frozen=True, slots=True)
class Sky:
    cluster: Cluster
    gate: Gate


async def strike(sky: Sky, what: Strike) -> None:
    """Carry out a strike. Raises Failed if it does not end as it must."""
    await asyncio.sleep(what.after)
    where = {}
    if what.slot is not None:
        pod = sky.cluster.pods[what.slot]
        where = {"slot": pod.slot, "attempt": pod.attempt}
    hurts = what.kind in HURTS
    sky.cluster.journal.write("strike", kind=what.kind, hurts=hurts, **where)
    await KINDS[what.kind](sky, what)
    sky.cluster.journal.write("answered", kind=what.kind, **where)


def _pod(sky: Sky, what: Strike) -> Pod:
    assert what.slot is not None
    return sky.cluster.pods[what.slot]


async def kill_worker(sky: Sky, what: Strike) -> None:
    _pod(sky, what).signal_workers(signal.SIGKILL)


async def stop_worker(sky: Sky, what: Strike) -> None:
    pod = _pod(sky, what)
    pod.signal_workers(signal.SIGSTOP)
    await asyncio.sleep(what.seconds)
    pod.signal_workers(signal.SIGCONT)


async def hang_worker(sky: Sky, what: Strike) -> None:
    """Stop the workers until their agent has killed them, or others have taken their place."""
    pod = _pod(sky, what)
    stopped = pod.workers()
    pod.signal_workers(signal.SIGSTOP)
    await sky.cluster.until(
        lambda _: not set(stopped) & set(pod.workers()),
        HANG_SECONDS + BY_NOW,
        "the hung worker ends",
    )


async def kill_agent(sky: Sky, what: Strike) -> None:
    _pod(sky, what).signal_agent(signal.SIGKILL)


async def stop_agent(sky: Sky, what: Strike) -> None:
    pod = _pod(sky, what)
    pod.signal_agent(signal.SIGSTOP)
    await asyncio.sleep(what.seconds)
    pod.signal_agent(signal.SIGCONT)


async def kill_container(sky: Sky, what: Strike) -> None:
    _pod(sky, what).kill()


async def lose_node(sky: Sky, what: Strike) -> None:
    pod = _pod(sky, what)
    with _handled(sky.cluster, pod):
        await sky.cluster.remove(pod)
        await asyncio.sleep(1.0)
        await sky.cluster.replace(pod.slot)


async def cut_network(sky: Sky, what: Strike) -> None:
    pod = _pod(sky, what)
    others = _others(sky.cluster, pod)
    sky.cluster.ground.cut([pod.ip], others)
    await asyncio.sleep(what.seconds)
    sky.cluster.ground.mend([pod.ip], others)


async def cut_for_good(sky: Sky, what: Strike) -> None:
    """The operator cannot reach the pod either and declares it gone. The pod learns from the run log
    that another epoch has claimed the run.
    """
    pod = _pod(sky, what)
    pod.reachable = False
    with _handled(sky.cluster, pod):
        sky.cluster.ground.cut([pod.ip], _others(sky.cluster, pod))
        await asyncio.sleep(3.0)
        await sky.cluster.replace(pod.slot)
        await _ends_fenced(sky.cluster, pod)


async def declare_gone(sky: Sky, what: Strike) -> None:
    """Declare the pod gone too early. It still runs, while its slot already has another pod."""
    pod = _pod(sky, what)
    with _handled(sky.cluster, pod):
        await sky.cluster.replace(pod.slot)
        await _ends_fenced(sky.cluster, pod)


async def leave(sky: Sky, what: Strike) -> None:
    cluster, pod = sky.cluster, _pod(sky, what)
    with _handled(cluster, pod):
        cluster.wish = cluster.wish.with_leave(pod.slot, True)
        me = (pod.slot, pod.attempt)
        await cluster.until(
            lambda s: any((x.slot, x.attempt) == me for x in s.left) or pod.over.is_set(),
            BY_NOW,
            f"slot {pod.slot} leaves",
        )
        cluster.wish = cluster.wish.with_leave(pod.slot, False)
        await cluster.remove(pod)
        await cluster.replace(pod.slot)


async def sigterm(sky: Sky, what: Strike) -> None:
    """Send SIGTERM to the agent, as for the deletion of its pod. Its end is handled like any other."""
    pod = _pod(sky, what)
    pod.signal_agent(signal.SIGTERM)
    await sky.cluster.until(lambda _: pod.over.is_set(), BY_NOW, f"slot {pod.slot} ends")


async def store_hangs(sky: Sky, what: Strike) -> None:
    async with sky.gate.silent():
        await asyncio.sleep(what.seconds)


async def store_refuses(sky: Sky, what: Strike) -> None:
    async with sky.gate.shut():
        await asyncio.sleep(what.seconds)


async def suspend(sky: Sky, what: Strike) -> None:
    cluster = sky.cluster
    cluster.may_create.clear()
    cluster.wish = cluster.wish.with_stop(levels.Stop.SUSPEND)
    try:
        await cluster.until(lambda s: s.stopped or _over(cluster), BY_NOW, "the job is suspended")
        await cluster.until(lambda _: _over(cluster), BY_NOW, "the suspended job's pods end")
        cluster.wish = cluster.wish.with_stop(levels.Stop.NONE)
        for slot, pod in list(cluster.pods.items()):
            cluster.wish = cluster.wish.with_gone(slot, pod.attempt)
            cluster.create(slot, pod.attempt + 1)
    finally:
        cluster.may_create.set()


async def edit(sky: Sky, what: Strike) -> None:
    """Edit a setting that applies at once, and one that applies from the next epoch on."""
    cluster = sky.cluster
    now = cluster.wish
    keep = 5 if now.settings.keep != 5 else 3
    cluster.wish = now.with_edit(keep, 40 if now.save_every_steps != 40 else 60)
    edited = cluster.wish.generation
    await cluster.until(
        lambda s: s.generation >= edited, BY_NOW, f"generation {edited} is acted on"
    )


def _over(cluster: Cluster) -> bool:
    return all(p.over.is_set() for p in cluster.pods.values())


def _others(cluster: Cluster, pod: Pod) -> list[str]:
    return [p.ip for p in cluster.pods.values() if p is not pod]


class _handled:  # noqa: N801 used like a function
    """In this context only the fault replaces this slot's pod."""

    def __init__(self, cluster: Cluster, pod: Pod) -> None:
        self._cluster, self._slot = cluster, pod.slot

    def __enter__(self) -> None:
        self._cluster.handled.add(self._slot)

    def __exit__(self, *_: object) -> None:
        self._cluster.handled.discard(self._slot)


async def _ends_fenced(cluster: Cluster, pod: Pod) -> None:
    await cluster.until(
        lambda _: pod.over.is_set(), ZOMBIE_SECONDS, f"slot {pod.slot}'s zombie ends"
    )
    ends = {report.Cause.FENCED, report.Cause.DONE, report.Cause.STOPPED}
    found = pod.report
    assert found is not None
    assert found.cause in ends, found


KINDS: dict[str, Callable[[Sky, Strike], Awaitable[None]]] = {
    "kill worker": kill_worker,
    "stop worker shortly": stop_worker,
    "stop worker until it counts as hung": hang_worker,
    "kill agent": kill_agent,
    "stop agent shortly": stop_agent,
    "stop agent until it counts as silent": stop_agent,
    "kill container": kill_container,
    "lose node": lose_node,
    "cut network shortly": cut_network,
    "cut network until peers are silent": cut_network,
    "cut network for good": cut_for_good,
    "leave": leave,
    "sigterm": sigterm,
    "declare gone": declare_gone,
    "store hangs": store_hangs,
    "store refuses": store_refuses,
    "suspend and resume": suspend,
    "edit": edit,
}

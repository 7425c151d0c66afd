"""What happens to a job, from `kubectl apply` to an end state that must not depend on when the
operator dies.
"""

from collections.abc import Awaitable, Callable

from crash.lane import Lane
from stub_image.given import build_stub_job

SHORT = 40
XID_STILL_COMPUTES = 64
XID_OFF_THE_BUS = 79
"""The XIDs of the demo's two acts."""

Scenario = Callable[[Lane, str], Awaitable[None]]


async def finish(lane: Lane, name: str) -> None:
    """The job is applied, trains and completes; its pods stay for their logs."""
    await lane.create(build_stub_job(name, until=SHORT))
    await lane.until_condition("Complete")

    async def over() -> bool:
        return all(p.phase == "Succeeded" for p in await lane.board.pods(name))

    await lane.until("all pods over", over)


async def pause(lane: Lane, name: str) -> None:
    """The job is suspended while it trains, then resumed."""
    await lane.create(build_stub_job(name))
    await lane.until_running()
    await lane.suspend(True)
    await lane.until_condition("Suspended")
    await lane.until_no_pods()
    await lane.suspend(False)
    await lane.until_running()


async def leave(lane: Lane, name: str) -> None:
    """The demo's first act: a GPU goes bad but still computes. The job saves and leaves the node;
    the node is repaired and released.
    """
    await _lose_a_node(lane, name, XID_STILL_COMPUTES)


async def die(lane: Lane, name: str) -> None:
    """The demo's second act: a GPU falls off the bus, and its rank dies."""
    await _lose_a_node(lane, name, XID_OFF_THE_BUS)


async def _lose_a_node(lane: Lane, name: str, xid: int) -> None:
    await lane.create(build_stub_job(name))
    await lane.until_running()
    node = await lane.break_gpu(1, xid)
    await lane.until_marked(node)
    await lane.until_running(slot_1=2)
    await lane.release(node)
    await lane.until_running(slot_1=2)


SCENARIOS: dict[str, Scenario] = {"finish": finish, "pause": pause, "leave": leave, "die": die}

"""Parts on their way to a coordinator that runs in the same agent."""

import asyncio
import io
from dataclasses import dataclass, field, replace
from typing import Any

from everstep_agent import logline
from everstep_agent.checkpoint.parts import Part
from everstep_agent.delivery import Delivery
from everstep_agent.peers import Pool
from everstep_agent.standing import Standing


@dataclass
class Desk:
    """Takes parts, as a coordinator's does."""

    taken: list[Part] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def desk(self) -> "Desk":
        return self

    def add_part(self, part: Part) -> None:
        self.taken.append(part)
        self.came.set()


async def test_a_save_of_the_whole_follows_the_share_of_the_same_step_and_nothing_comes_twice() -> (
    None
):
    share = Part(epoch=1, step=28, rank=1)
    whole = replace(share, whole=True, lead=True)
    parts: dict[tuple[int, int, int], Part] = {(1, 28, 1): share}
    coordinator: Any = Desk()
    standing = Standing()
    standing.coordinator = coordinator
    delivery = Delivery(
        standing=standing,
        pool=Pool("token"),
        parts=lambda: parts,
        following=lambda: "",
        line=logline.Log(io.StringIO()),
    )
    running = asyncio.create_task(delivery.run())
    try:
        for part in (share, share, whole, whole, replace(share, step=32)):
            parts[part.epoch, part.step, part.rank] = part
            expected = part in coordinator.taken
            coordinator.came.clear()
            delivery.wake(part)
            if not expected:
                await asyncio.wait_for(coordinator.came.wait(), 30)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert coordinator.taken == [share, whole, replace(share, step=32)]

"""Copies this pod's saves to the memory of another pod and, if the node has one, to a disk."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine
from functools import partial

from everstep_agent.checkpoint.keeping import Resumed
from everstep_agent.checkpoint.tiers import NearTier
from everstep_agent.context import Context
from everstep_agent.peers.budget import Budget
from everstep_agent.peers.client import Pool
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember
from everstep_agent.peers.partners import choose_partners, list_places
from everstep_agent.peers.peer_tier import PeerTier, choose_order
from everstep_agent.pod.copier import Copier, Pause
from everstep_agent.waiting import happens
from everstep_contract import levels


class Copies:
    """`on_copied` is called when `peer_step` has changed."""

    def __init__(
        self,
        context: Context,
        pool: Pool,
        on_copied: Callable[[], None],
    ) -> None:
        self._settings, self._line = context.settings, context.line
        self._memory, self._disk = context.memory, context.disk
        self._pool, self._on_copied = pool, on_copied
        self._owner = f"slot-{context.me.slot}"
        rate = context.settings.peer_bandwidth
        self._budget = Budget(rate) if rate > 0 else None
        self._epoch, self._revision, self._partner = 0, -1, ""
        """The epoch and revision that the targets were chosen for; the other pod's address."""
        self._hurried = asyncio.Event()
        self._to_peer: Copier | None = None
        self._to_disk: Copier | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def aim(self, level: EpochLevel, wanted: levels.Wanted) -> None:
        """Copy to the pod that the members of this epoch determine.

        Does nothing if it was called before with the same epoch and revision.
        """
        if (level.number, wanted.revision) == (self._epoch, self._revision):
            return
        if level.number != self._epoch:
            self._enter(level)
        self._epoch, self._revision = level.number, wanted.revision
        partners = choose_partners(list_places(level.members, wanted.peers))
        partner = partners.get(self._settings.slot) if self._budget else None
        address = partner.address if partner else ""
        if address != self._partner:
            self._aim_at(address)

    def _enter(self, level: EpochLevel) -> None:
        self._aim_at("")
        self._begin(self._rewind(level))
        if self._disk is not None and self._to_disk is None:
            pause = partial(happens, self._hurried, self._settings.disk_seconds)
            self._to_disk = self._copy_to(self._disk, pause)

    def _aim_at(self, address: str) -> None:
        if self._to_peer is not None:
            self._begin(self._to_peer.close())
        self._partner, self._to_peer = address, None
        if address:
            tier = PeerTier(self._pool, address, self._owner, self._budget)
            self._to_peer = self._copy_to(tier)

    def _copy_to(self, tier: NearTier, pause: Pause | None = None) -> Copier:
        return Copier(
            self._memory,
            tier,
            owner=self._owner,
            pause=pause,
            on_copied=self._on_copied,
            line=self._line,
        )

    async def _rewind(self, level: EpochLevel) -> None:
        """Drop the saves that this epoch does not continue."""
        epoch = level.commit.epoch if level.commit and not level.in_place else None
        resumed = Resumed(epoch=epoch, step=level.resume, by=level.number)
        self._memory.committed = min(self._memory.committed, level.resume)
        self._memory.kept = 0
        if self._to_disk is not None:
            self._to_disk.forget()
        for tier in (self._memory, self._disk):
            if tier is not None:
                with contextlib.suppress(OSError):  # the next copy reports the same error
                    await tier.rewind(resumed)

    def hurry(self) -> None:
        """This pod ends soon: copy its last save at once, and as fast as possible."""
        self._hurried.set()
        if self._budget is not None:
            self._budget.lift()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def list_nearer(self, members: Collection[EpochMember], own: str) -> list[NearTier]:
        """The tiers between this pod's memory and the store, the nearest first."""
        order = choose_order([m.address for m in members], own)
        peers = [PeerTier(self._pool, address) for address in order]
        return [*([self._disk] if self._disk else []), *peers]

    @property
    def peer_step(self) -> int:
        """The newest step whose save is also in another pod's memory; 0: none."""
        return self._to_peer.copied if self._to_peer else 0

    @property
    def disk_step(self) -> int:
        """The newest step whose save is also on the node's disk; 0: none."""
        return self._to_disk.copied if self._to_disk else 0

    async def clear_disk(self) -> None:
        """Delete this pod's copies on the node's disk, because the run has reached its end."""
        if self._to_disk is not None:
            await self._to_disk.close()
        if self._disk is not None:
            with contextlib.suppress(OSError):  # they cost room, nothing else
                await self._disk.drop(self._owner)

    async def close(self) -> None:
        for copier in (self._to_peer, self._to_disk):
            if copier is not None:
                await copier.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

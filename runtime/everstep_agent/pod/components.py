"""The components of a pod, and how they are connected. `pod.py` drives them with the coordinator's levels,
`worker_frames.py` with what the workers send, and `pod_report.py` reports on them.
"""

import os
import time
from pathlib import Path

from everstep_agent.checkpoint.ledger import Book
from everstep_agent.context import Context
from everstep_agent.live_settings import apply_wanted
from everstep_agent.peers.budget import Budget
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember
from everstep_agent.pod import hang
from everstep_agent.pod.copies import Copies
from everstep_agent.pod.deaths import Deaths
from everstep_agent.pod.fetch_ledger import LedgerFetcher
from everstep_agent.pod.fetch_state import Restorer
from everstep_agent.pod.hang_watch import HangWatch
from everstep_agent.pod.in_place_join import InPlaceJoin
from everstep_agent.pod.news import News
from everstep_agent.pod.pod_epoch import PodEpoch
from everstep_agent.pod.pod_saves import PodSaves
from everstep_agent.pod.relay import Relay
from everstep_agent.pod.save_queue import Listener
from everstep_agent.pod.share_reader import ShareReader
from everstep_agent.pod.start_holds import StartHolds
from everstep_agent.pod.time_ledger import TimeLedger
from everstep_agent.pod.worker import Worker
from everstep_agent.pod.workers import WorkerSet
from everstep_contract import levels


class Components:
    def __init__(
        self,
        context: Context,
        *,
        news: News,
        workers: WorkerSet,
        relay: Relay,
        listener: Listener,
    ) -> None:
        self.context = context
        self.news = news
        self.workers = workers
        self.relay = relay
        settings, line, store = context.settings, context.line, context.store
        self.epoch = PodEpoch()
        self.deaths = Deaths(context.me, line)
        self.holds = StartHolds(self.deaths, news.touch)
        self.seconds = TimeLedger()
        self.book = Book()
        self.saves = PodSaves(context, self.book, listener, news.touch)
        self.copies = Copies(context, relay.pool, news.touch)
        restore = Path(settings.memory) / "restore"
        self.restorer = Restorer(store, restore, context.memory, news.touch, line, news.fail)
        self.share_reader = ShareReader(
            store,
            Budget(settings.read_back_bandwidth),
            uploads=lambda: self.saves.busy,
            on_news=news.touch,
            line=line,
        )
        self.ledger_fetcher = LedgerFetcher(relay.pool, self.book, news.touch, line)
        self.joining = InPlaceJoin(settings, context.me, workers, self.ledger_fetcher, line)
        self.hang_watch = HangWatch(workers, news.touch, line)
        given = hang.Limits(step=settings.hang_seconds, startup=settings.startup_seconds)
        self._limits_by: tuple[levels.Wanted | None, hang.Limits] = None, given
        """The document that the limits were computed from (None: the settings), and the limits."""

    async def open(self) -> None:
        settings = self.context.settings
        for name in ("staging", "restore"):
            os.makedirs(os.path.join(settings.memory, name), exist_ok=True)
        await self.saves.open()
        await self.workers.processes.open()
        for local in range(settings.workers):
            self.seconds.rest(local, time.monotonic())

    async def close(self) -> None:
        await self.restorer.close()
        await self.share_reader.close()
        await self.ledger_fetcher.close()
        await self.copies.close()
        await self.saves.close()
        await self.workers.close()

    def find_place(self, level: EpochLevel) -> EpochMember | None:
        """The place of the local workers in an epoch that continues theirs."""
        mine = level.place_after(self.epoch.number, self.context.me.id)
        return mine if mine is not None and self.workers.are_current(mine.lives) else None

    @property
    def kept_out(self) -> bool:
        """Whether the newest epoch has a place for the local workers that they did not take: they
        have joined a later epoch, or another coordinator has cut theirs. Nothing ends them until
        their state is saved.
        """
        level = self.epoch.newest_level
        return level is not None and self.find_place(level) is not None

    @property
    def node(self) -> str:
        return self.deaths.wanted.find_node(*self.context.me.place)

    @property
    def limits(self) -> hang.Limits:
        """The job's limits for a worker that hangs."""
        wanted, limits = self._limits_by
        if wanted is not self.deaths.wanted:  # computed once for each document
            wanted = self.deaths.wanted
            live = apply_wanted(self.context.settings, wanted)
            limits = hang.Limits(step=live.hang_seconds, startup=live.startup_seconds)
            self._limits_by = wanted, limits
        return limits

    def say_that_it_runs(self, worker: Worker) -> None:
        if (found := worker.tracked) is None:
            return
        self.context.line.say(
            "worker_runs",
            rank=worker.rank,
            pid=worker.pid,
            applied=found.applied,
            bytes=found.bytes,
        )

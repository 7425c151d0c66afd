"""All running pods read a checkpoint back: the coordinator publishes shares, the pods report what they have read."""

import asyncio
from collections.abc import Callable, Mapping

from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.coordinator.read_back_rules import Turn, Unread, plan_turn
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import Id
from everstep_agent.peers.read_back import ReadBack, ReadReport
from everstep_agent.waiting import happens
from everstep_contract.log import Commit
from everstep_contract.manifest import Chunk

LOOK_SECONDS = 1.0


class ReadBacks:
    """Runs one read-back at a time.

    Args:
        recent: reports of the pods that are not silent.
        publish: called when `level` has changed.
    """

    def __init__(
        self,
        recent: Callable[[], list[AgentReport]],
        publish: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.level: ReadBack | None = None
        self._recent, self._publish, self._now = recent, publish, now
        self._heard: dict[Id, ReadReport] = {}
        self._news = asyncio.Event()

    def hear(self, report: AgentReport) -> None:
        """Wakes the read-back once a pod has read its share, or has found a chunk broken."""
        found, level = report.read_back, self.level
        if level is None or found is None or found == self._heard.get(report.id):
            return
        self._heard[report.id] = found
        if found.manifest == level.commit.manifest and (found.problem or not found.left):
            self._news.set()

    async def read(
        self, commit: Commit, chunks: Mapping[int, Chunk], uploaders: Mapping[str, int]
    ) -> None:
        """Have these chunks read back. Returns once each of them was read from the store, by
        whichever pod.

        Args:
            chunks: by their place in the manifest's list.
            uploaders: digest → slot of the pod that uploaded the chunk, as far as known.

        Raises:
            Broken: one of them is missing or does not match its digest.
        """
        unread = {
            place: Unread(bytes=chunk.bytes, uploader=uploaders.get(chunk.digest))
            for place, chunk in chunks.items()
        }
        turn = Turn(commit=commit, unread=unread)
        self._heard.clear()
        try:
            while not (turn := self._plan(turn)).over:
                self._show(turn.level())
                await happens(self._news, LOOK_SECONDS)
        finally:
            self._show(None)
        if turn.problem:
            raise Broken(turn.problem)

    def _plan(self, turn: Turn) -> Turn:
        self._news.clear()
        return plan_turn(turn, self._recent(), self._now())

    def _show(self, level: ReadBack | None) -> None:
        if level != self.level:
            self.level = level
            self._publish()

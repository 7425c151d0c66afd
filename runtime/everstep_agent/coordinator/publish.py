"""What the coordinator publishes to its agents and the operator: one document, read by long-poll."""

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from everstep_agent.peers.epoch_level import Stage
from everstep_agent.peers.messages import Levels
from everstep_agent.waiting import Change
from everstep_contract import codec
from everstep_contract.levels import Seen

LONG_POLL_SECONDS = 4.0
SEEN_SECONDS = 0.5
"""Maximum age of `seen` when nothing else changed: it is built once for many readers."""
NOT_BUILT = float("-inf")


class Board:
    """The published levels. `seen` is part of them; a change of `seen` alone wakes readers only if
    they need it.
    """

    def __init__(self, first: Levels, build_seen: Callable[[], Seen]) -> None:
        self._levels = first
        self._build_seen = build_seen
        self._changed = Change()
        self._read: dict[str, int] = {}
        """Reader → newest version that it has received."""
        self._end_version = 0
        """Version of the levels that announce the end; readers need nothing later."""
        self._served_at = 0.0
        """When the operator last received `seen`."""
        self._end_served = False
        self._sealed = False
        self._built_at = 0.0
        """When `seen` was built; `NOT_BUILT`: not since the newest document was published."""
        self._written: tuple[Levels, bytes] | None = None

    @property
    def levels(self) -> Levels:
        return self._levels

    def publish(self, document: Levels) -> bool:
        """Publish the document with a new version. Returns whether anything changed that readers wait
        for. The `seen` of `document` needs only the fields that readers wait for; the rest is built
        when somebody reads it, because several changes often follow each other at once.
        """
        if self._sealed or _matter(document) == _matter(self._levels):
            return False
        version, wakes = self._levels.version, not _only_claimed(document, self._levels)
        if wakes:
            version += 1
            if document.end is not None and self._levels.end is None:
                self._end_version = version
            self._changed.fire()
        self._levels, self._built_at = replace(document, version=version), NOT_BUILT
        return True

    def seal(self, document: Levels) -> None:
        """Publish the last document of a term that has failed or hands over; nothing is published
        after it.
        """
        self._build_seen = lambda: document.seen
        if not self.publish(document):
            self._set(replace(document, version=self._levels.version))
        self._sealed = True

    async def wait_newer(self, version: int, reader: str = "") -> Levels:
        """The levels as soon as they are newer than `version`; after a while the same ones with a
        fresh `seen`.
        """
        newer = await self._changed.until(lambda: self._levels.version > version, LONG_POLL_SECONDS)
        unread = self._built_at == NOT_BUILT
        if unread or (not newer and time.monotonic() - self._built_at > SEEN_SECONDS):
            self._set(replace(self._levels, seen=self._build_seen()))
        if reader:
            self._read[reader] = self._levels.version
        return self._levels

    async def serve(self, version: int, reader: str) -> bytes:
        """`wait_newer`, encoded as JSON once for all readers."""
        document = await self.wait_newer(version, reader)
        if self._written is None or self._written[0] is not document:
            self._written = document, codec.dumps(document)
        return self._written[1]

    def _set(self, document: Levels) -> None:
        self._levels, self._built_at = document, time.monotonic()

    def serve_seen(self, now: float) -> Seen:
        """The current `seen`, for the operator."""
        self._served_at, self._end_served = now, self._levels.end is not None
        return self._build_seen()

    def is_read(self, readers: Collection[str], version: int, since: float) -> bool:
        """Whether these agents have read `version`, and the operator has read `seen` after `since`.
        Once the job has ended, it is enough that both know of the end.
        """
        if self._levels.end is not None:
            version, told = self._end_version, self._end_served
        else:
            told = self._served_at > since
        return told and all(self._read.get(a, 0) >= version for a in readers)


def _only_claimed(new: Levels, old: Levels) -> bool:
    """Whether the only news is that the claim of an epoch whose group is still being formed is in the
    log. Readers can wait for it until the group is formed: each document that they read takes a core
    that a rank needs.
    """
    if new.epoch is None or old.epoch is None or new.epoch.stage is not Stage.STARTING:
        return False
    then = replace(old.epoch, unclaimed=new.epoch.unclaimed)
    return _matter(replace(old, epoch=then, claimed=new.claimed)) == _matter(new)


def _matter(document: Levels) -> tuple[object, ...]:
    seen = document.seen
    return (
        document.round,
        document.claimed,
        document.epoch,
        document.unfinished,
        document.read_back,
        document.wanted,
        document.end,
        document.laid_down,
        document.faults,
        seen.left,
        seen.stopped,
        seen.done,
        seen.failure,
        seen.incidents,
    )

"""The state that follows from the entries of a log. Pure.

A log only grows, so the state is updated with each entry that is read: a query costs the same after
a week as after a minute. The rules are in `rules.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from everstep_agent.runlog.retired_keys import RetiredKeys
from everstep_agent.runlog.rules import lineage_of, oldest_living
from everstep_contract.log import Claim, Commit, Done, Entry, MemberId, Retire

RETIRES = 3
"""Of how many of the newest `retire` entries the chunks are listed."""


class LogIndex:
    """Entries in the order of their places; `add` appends the next one."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: list[Entry] = []
        self._places: dict[Entry, int] = {}
        self._claims: list[Claim] = []
        self._members: dict[MemberId, MemberId] = {}
        self._oldest_living = 0
        self._restarts: dict[str, dict[str, int]] = {}
        """Job UID → its claims after the first, by cause."""
        self._lineage: dict[int, int] = {}
        """Of the newest claim: epoch → last step that belongs to the run."""
        self._commits: list[Commit] = []
        self._standing: dict[int, Commit] = {}
        """Commits that are not retired, by place."""
        self._of_manifest: dict[str, list[int]] = {}
        self._of_step: dict[tuple[int, int], int] = {}
        self._retires: dict[int, Retire] = {}
        """The newest ones, by place."""
        self._retired_manifests: set[str] = set()
        self._retired_chunks = RetiredKeys()
        self._pins: dict[str, Commit] = {}
        """Every name that was ever used → its commit."""
        self._unpinned: set[str] = set()
        self._done: dict[str, Done] = {}
        self._highest_epoch = 0
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        if isinstance(entry, Claim):  # most members are in many claims: keep each once
            members = tuple(self._members.setdefault(m, m) for m in entry.members)
            entry = replace(entry, members=members)
        place = len(self._entries)
        self._entries.append(entry)
        self._places.setdefault(entry, place)
        self._highest_epoch = max(self._highest_epoch, entry.epoch)
        match entry:
            case Claim():
                self._add_claim(entry)
            case Commit():
                self._add_commit(place, entry)
            case Retire():
                self._add_retire(place, entry)
            case Done():
                self._done.setdefault(entry.token, entry)

    def _add_claim(self, claim: Claim) -> None:
        self._claims.append(claim)
        self._oldest_living = oldest_living(self._claims)
        causes = self._restarts.get(claim.job_uid)
        if causes is None:
            self._restarts[claim.job_uid] = {}
        else:
            cause = claim.cause or "Unknown"
            causes[cause] = causes.get(cause, 0) + 1
        self._lineage = {}
        for link in lineage_of(claim):
            self._lineage[link.epoch] = max(link.last_step, self._lineage.get(link.epoch, 0))

    def _add_commit(self, place: int, commit: Commit) -> None:
        self._commits.append(commit)
        self._of_step.setdefault((commit.epoch, commit.step), place)
        self._of_manifest.setdefault(commit.manifest, []).append(place)
        for name in commit.pins:
            self._pins.setdefault(name, commit)
        if commit.manifest not in self._retired_manifests:
            self._standing[place] = commit

    def _add_retire(self, place: int, retire: Retire) -> None:
        self._unpinned.update(retire.unpins)
        self._retired_manifests.update(retire.manifests)
        self._retired_chunks.add(retire.chunks)
        if retire.manifests or retire.chunks:
            self._retires[place] = retire
            if len(self._retires) > RETIRES:
                self._forget_chunks(next(iter(self._retires)))
        for manifest in retire.manifests:
            for place in self._of_manifest.get(manifest, ()):
                self._standing.pop(place, None)

    def _forget_chunks(self, place: int) -> None:
        """Free the memory of a list of chunks that nobody needs any more."""
        entry = self._retires.pop(place)
        if entry.chunks:
            self._places.pop(entry, None)
            self._entries[place] = replace(entry, chunks=())

    # --- entries ---------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[Entry]:
        """All of them: entry n is at place n; older `retire` entries without their chunks. Do not
        modify.
        """
        return self._entries

    def place_of(self, entry: Entry) -> int | None:
        """The place of exactly this entry; entries carry their writer's random token."""
        return self._places.get(entry)

    # --- claims ----------------------------------------------------------------------------------

    @property
    def claims(self) -> Sequence[Claim]:
        return self._claims

    @property
    def newest_claim(self) -> Claim | None:
        return self._claims[-1] if self._claims else None

    @property
    def oldest_living(self) -> int:
        """As `rules.oldest_living`."""
        return self._oldest_living

    @property
    def next_epoch(self) -> int:
        """A number that no epoch in the log has."""
        return self._highest_epoch + 1

    def has_claimed(self, job_uid: str) -> bool:
        return job_uid in self._restarts

    def restarts(self, job_uid: str) -> Mapping[str, int]:
        """Group restarts of this job by cause: its claims after the first."""
        return self._restarts.get(job_uid, {})

    @property
    def done(self) -> Done | None:
        """The run's end; None again once a later claim continues it (a raised `until`)."""
        newest = self.newest_claim
        return self._done.get(newest.token) if newest else None

    # --- checkpoints -----------------------------------------------------------------------------

    @property
    def commits(self) -> Sequence[Commit]:
        """All commits, of any lineage."""
        return self._commits

    def find_commit(self, epoch: int, step: int) -> tuple[int, Commit] | None:
        """The commit of this step, with its place in the log."""
        place = self._of_step.get((epoch, step))
        found = self._entries[place] if place is not None else None
        return (place, found) if place is not None and isinstance(found, Commit) else None

    def is_on_lineage(self, epoch: int, step: int) -> bool:
        """Whether this step of this epoch belongs to the run that the newest claim continues."""
        return step <= self._lineage.get(epoch, -1)

    def resumable(self) -> Iterator[Commit]:
        """Commits on the newest claim's lineage that are not retired, newest first."""
        for commit in reversed(self._standing.values()):
            if self.is_on_lineage(commit.epoch, commit.step):
                yield commit

    @property
    def newest_resumable(self) -> Commit | None:
        return next(self.resumable(), None)

    def standing_before(self, commit: Commit) -> list[Commit]:
        """Commits of any lineage that precede this one and are not retired, oldest first."""
        last = self._places[commit]
        return [c for place, c in self._standing.items() if place < last]

    @property
    def standing(self) -> Sequence[Commit]:
        """Commits of any lineage that are not retired, oldest first."""
        return list(self._standing.values())

    def first_steps(self) -> Mapping[int, int]:
        """Epoch → its first step whose checkpoint is not retired, or was ever pinned. A later claim's
        chain must show whether the run continues from it.
        """
        found: dict[int, int] = {}
        for commit in (*self._standing.values(), *self._pins.values()):
            found[commit.epoch] = min(commit.step, found.get(commit.epoch, commit.step))
        return found

    # --- pins ------------------------------------------------------------------------------------

    @property
    def pins(self) -> Mapping[str, Commit]:
        """Name → the commit that is kept under it."""
        kept = {n: c for n, c in self._pins.items() if n not in self._unpinned}
        return {n: c for n, c in kept.items() if c.manifest not in self._retired_manifests}

    def find_pin(self, name: str) -> Commit | None:
        """The commit that was pinned under this name, even if it has been given up since."""
        return self._pins.get(name)

    def is_pinned(self, commit: Commit) -> bool:
        return any(self._pins[n] == commit and n not in self._unpinned for n in commit.pins)

    def is_committed(self, manifest: str) -> bool:
        return manifest in self._of_manifest

    # --- retired objects
    # ---------------------------------------------------------------------------

    @property
    def retires(self) -> Sequence[Retire]:
        """The newest entries after which objects may be deleted."""
        return list(self._retires.values())

    @property
    def retired_count(self) -> int:
        """The number of retired manifests."""
        return len(self._retired_manifests)

    def is_retired(self, key: str) -> bool:
        """Whether this chunk or manifest may be deleted at any time."""
        return key in self._retired_chunks or key in self._retired_manifests

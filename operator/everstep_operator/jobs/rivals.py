"""Which job must give its nodes back first: the jobs that hold nodes without training, or recently
gave them back, by age.

Invariant: of all jobs that hold nodes in vain, only the youngest has to give them back, so only the
youngest is woken when another job changes. A query is a look-up; a change sorts all entries.
"""

import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from everstep_operator.jobs import observe
from everstep_operator.jobs.observed import Pod, Rival
from everstep_operator.world import Key, Object, World, key_of, life_of

Age = tuple[float, str]
"""(creation, UID): also orders two jobs that were created in the same second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    age: Age
    key: Key
    rival: Rival


class Ranking:
    """Entries by age. Pure."""

    def __init__(self, entries: Collection[Entry] = ()) -> None:
        self._entries = sorted(entries, key=lambda e: e.age)
        self._ages = [e.age for e in self._entries]
        self._gave_back = _newest_after(self._entries)
        holders = [e for e in self._entries if e.rival.holds]
        self.youngest_holder = holders[-1] if holders else None

    def find_younger(self, mine: Age) -> tuple[Rival, ...]:
        """All younger jobs combined in one: whether any holds nodes, and when the last of them gave
        its nodes back.
        """
        first = bisect.bisect_right(self._ages, mine)
        if first == len(self._ages):
            return ()
        youngest = self.youngest_holder
        holds = youngest is not None and youngest.age > mine
        return (Rival(holds=holds, gave_back_at=self._gave_back[first]),)


def _newest_after(entries: Sequence[Entry]) -> list[float | None]:
    """For each entry, the last time at which its job or a younger one gave its nodes back."""
    found: list[float | None] = []
    newest: float | None = None
    for entry in reversed(entries):
        gave = entry.rival.gave_back_at
        newest = max((t for t in (newest, gave) if t is not None), default=None)
        found.append(newest)
    return found[::-1]


class Rivals:
    """The ranking, updated job by job. `pods_of` returns a job's own pods."""

    def __init__(
        self,
        world: World,
        pods_of: Callable[[Object], tuple[Pod, ...]],
        wake: Callable[[Key], None],
    ) -> None:
        self._world, self._pods_of, self._wake = world, pods_of, wake
        self._changed_jobs = world.jobs.follow_groups("job")
        self._changed_pods = world.pods.follow_groups("job")
        self._entries: dict[str, Entry] = {}
        self._ranking = Ranking()

    def find_younger(self, job: Object) -> tuple[Rival, ...]:
        return self._ranking.find_younger(observe.age_of(job))

    def refresh(self, mine: Object | None = None, pods: Collection[Pod] = ()) -> None:
        """Read what has changed since the last call; `pods` are those of `mine`, if it is given."""
        changed = self._changed_jobs | self._changed_pods
        self._changed_jobs.clear()
        self._changed_pods.clear()
        mine_life = life_of(mine) if mine is not None else ""
        news = False
        for life in changed:
            if life == mine_life and mine is not None:
                news |= self._note(life, _build_entry(mine, pods))
            else:
                news |= self._note(life, self._read(life))
        if news:
            self._rank()

    def _read(self, life: str) -> Entry | None:
        found = self._world.jobs.group("job", life)
        if not found or not observe.is_waiting(found[0]):
            return None
        return _build_entry(found[0], self._pods_of(found[0]))

    def _note(self, life: str, entry: Entry | None) -> bool:
        """Store or remove the entry; returns whether that changed anything."""
        if self._entries.get(life) == entry:
            return False
        if entry is None:
            del self._entries[life]
        else:
            self._entries[life] = entry
        return True

    def _rank(self) -> None:
        self._ranking = Ranking(self._entries.values())
        if self._ranking.youngest_holder is not None:
            self._wake(self._ranking.youngest_holder.key)


def _build_entry(job: Object, pods: Collection[Pod]) -> Entry | None:
    if not observe.is_waiting(job):
        return None
    rival = observe.to_rival(job, pods)
    if not rival.holds and rival.gave_back_at is None:
        return None
    return Entry(age=observe.age_of(job), key=key_of(job), rival=rival)

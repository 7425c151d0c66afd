"""Which pod reads which chunks of a checkpoint back. Pure.

The pod that uploaded a chunk does not read it if another can: its own caches could answer in place of the store.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import Id
from everstep_agent.peers.read_back import ReadBack, Share
from everstep_contract.log import Commit
from everstep_contract.ranges import list_ranges, to_ranges

SLOW_SECONDS = 150.0
"""Longer than one chunk takes at the lowest bandwidth (64 s) if the store uses up its time limit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    bytes: int
    uploader: int | None = None
    """The slot of the pod that uploaded the chunk; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How far the read-back of one checkpoint is."""

    commit: Commit
    unread: Mapping[int, Unread]
    """Place in the manifest's list → the chunk."""
    readers: Mapping[int, Id] = field(default_factory=dict)
    """Place → the pod that reads this chunk, or has read it. Chunks that were read stay here, so
    the level rarely changes.
    """
    progress: Mapping[Id, float] = field(default_factory=dict)
    """Pod → when it was given a share, or was seen to have read another chunk."""
    slow: frozenset[Id] = frozenset()
    """Pods that get no share while others can read."""
    problem: str = ""

    @property
    def over(self) -> bool:
        return bool(self.problem) or not self.unread

    def level(self) -> ReadBack:
        held: dict[Id, list[int]] = {}
        for place, pod in self.readers.items():
            held.setdefault(pod, []).append(place)
        return ReadBack(
            commit=self.commit,
            shares=tuple(
                Share(slot=slot, attempt=attempt, incarnation=incarnation, chunks=to_ranges(places))
                for (slot, attempt, incarnation), places in sorted(held.items())
            ),
        )


def plan_turn(turn: Turn, reports: Iterable[AgentReport], now: float) -> Turn:
    """The turn that follows from these reports.

    Args:
        reports: of the pods that are not silent.
    """
    known = list(reports)
    about = [r.read_back for r in known if r.read_back]
    about = [r for r in about if r.manifest == turn.commit.manifest]
    read = {place for report in about for place in list_ranges(report.read)}
    unread = {place: chunk for place, chunk in turn.unread.items() if place not in read}
    problem = next((r.problem for r in about if r.problem), "")
    progress = _note_progress(turn, unread, now)
    slow = turn.slow | {pod for pod, since in progress.items() if now - since > SLOW_SECONDS}
    able = {r.id for r in known if r.read_back is not None and not r.leaving}
    chosen = able - slow
    if not chosen:  # then the store is slow, not a pod
        chosen, slow = able, frozenset()
    held = {p: pod for p, pod in turn.readers.items() if p not in unread or pod in chosen}
    readers = assign(unread, held, chosen)
    return replace(
        turn,
        unread=unread,
        readers=readers,
        progress={readers[p]: progress.get(readers[p], now) for p in unread if p in readers},
        slow=slow,
        problem=problem,
    )


def _note_progress(turn: Turn, unread: Collection[int], now: float) -> dict[Id, float]:
    advanced = {turn.readers.get(place) for place in turn.unread if place not in unread}
    return {pod: now if pod in advanced else since for pod, since in turn.progress.items()}


def assign(
    unread: Mapping[int, Unread], held: Mapping[int, Id], readers: Collection[Id]
) -> dict[int, Id]:
    """Place → reader. A chunk keeps the reader that it has in `held`. The rest goes to the pods in
    runs of neighbouring chunks, which are short in a document, until each pod has its part of the
    bytes.
    """
    found, loads = dict(held), dict.fromkeys(sorted(readers), 0)
    for place, pod in held.items():
        if place in unread:
            loads[pod] += unread[place].bytes
    fair = sum(chunk.bytes for chunk in unread.values()) / max(1, len(loads))
    reader: Id | None = None
    for place in sorted(unread.keys() - held.keys()) if loads else ():
        chunk = unread[place]
        if reader is None or reader[0] == chunk.uploader or loads[reader] >= fair:
            reader = _choose_reader(loads, fair, chunk.uploader)
        found[place] = reader
        loads[reader] += chunk.bytes
    return found


def _choose_reader(loads: Mapping[Id, int], fair: float, uploader: int | None) -> Id:
    """The next pod after the uploader that has room; if none has, the one with the fewest bytes."""
    others = [pod for pod in loads if pod[0] != uploader] or list(loads)
    after = [pod for pod in others if uploader is not None and pod[0] > uploader]
    around = [*after, *others]
    free = next((pod for pod in around if loads[pod] < fair), None)
    return free or min(around, key=loads.__getitem__)

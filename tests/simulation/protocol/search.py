"""Breadth-first over every order of what can happen; the first broken invariant comes with its story."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from everstep_contract.log import Claim, Commit
from simulation.protocol.moves import Rules, list_moves
from simulation.protocol.world import LIVING, OVER, World

Check = Callable[[World, World], str]


@dataclass(slots=True)
class Found:
    states: int = 0
    moves: int = 0
    depth: int = 0
    complete: bool = True
    """Every reachable state was visited."""
    broken: str = ""
    story: list[str] = field(default_factory=list)
    finished: int = 0
    """States in which the run has reached its end."""
    stuck: list[str] = field(default_factory=list)
    """The story of a state from which no order of events reaches the end."""


def search(first: World, rules: Rules, *, states: int = 100_000, seconds: float = 60.0) -> Found:
    found, until = Found(), time.monotonic() + seconds
    came: dict[World, tuple[World | None, str]] = {first: (None, "")}
    before: dict[World, list[World]] = {}
    queue = deque([(first, 0)])
    while queue:
        world, depth = queue.popleft()
        found.depth = max(found.depth, depth)
        for name, after in list_moves(world, rules):
            found.moves += 1
            before.setdefault(after, []).append(world)
            if after in came:
                continue
            came[after] = world, name
            if problem := check(world, after):
                found.states, found.broken = len(came), problem
                found.story = list(tell(came, after))
                return found
            queue.append((after, depth + 1))
        if len(came) > states or time.monotonic() > until:
            found.complete = False
            break
    found.states = len(came)
    ends = [w for w in came if is_done(w, rules)]
    found.finished = len(ends)
    if found.complete:
        found.stuck = _find_stuck(came, before, ends)
    return found


def _find_stuck(
    came: dict[World, tuple[World | None, str]], before: dict[World, list[World]], ends: list[World]
) -> list[str]:
    """A state from which the end cannot be reached whatever happens."""
    good, queue = set(ends), deque(ends)
    while queue:
        for earlier in before.get(queue.popleft(), ()):
            if earlier not in good:
                good.add(earlier)
                queue.append(earlier)
    lost = next((w for w in came if w not in good), None)
    return list(tell(came, lost)) if lost is not None else []


def tell(came: dict[World, tuple[World | None, str]], world: World) -> Iterator[str]:
    names: list[str] = []
    at: World | None = world
    while at is not None:
        at, name = came[at]
        names.append(name)
    return reversed(names[:-1])


def is_done(world: World, rules: Rules) -> bool:
    return any(isinstance(e, Commit) and e.step >= rules.steps for e in world.entries())


# --- what must always hold ---------------------------------------------------------------------------------


def check(before: World, after: World) -> str:
    return (
        _never_rewritten(before, after)
        or _one_lineage(after)
        or _nothing_passed_over(before, after)
        or _nothing_thrown_away(before, after)
    )


def _never_rewritten(before: World, after: World) -> str:
    if after.log[: len(before.log)] != before.log:
        return "an entry of the log was written over"
    return ""


def _one_lineage(world: World) -> str:
    """Each commit extends the one before it in what it trained."""
    commits = [e for e in world.entries() if isinstance(e, Commit)]
    held = [world.held(c.manifest) for c in commits]
    for older, newer in itertools.pairwise(held):
        if newer[: len(older)] != older:
            return f"a commit of {newer} does not go on from {older}"
    return ""


def _nothing_passed_over(before: World, after: World) -> str:
    """A new epoch does not resume behind a living member that its claimer reaches and nobody gave up."""
    if len(after.log) == len(before.log) or not isinstance(claim := after.entries()[-1], Claim):
        return ""
    former = [e for e in before.entries() if isinstance(e, Claim)]
    if not former:
        return ""
    resumed = claim.chain[-1].last_step if claim.chain else 0
    claimer = next(c.place for c in after.coordinators if c.level and c.level.token == claim.token)
    for pod in before.pods:
        held = pod.snap.epoch == former[-1].epoch and pod.snap.work in LIVING and pod.up
        place = pod.snap.place
        kept = place not in before.gone | before.given_up and before.linked(claimer, place)
        if held and kept and pod.snap.step > resumed:
            return f"{pod.snap.place} holds step {pod.snap.step}, epoch {claim.epoch} resumes at {resumed}"
    return ""


def _nothing_thrown_away(before: World, after: World) -> str:
    """A worker of the newest epoch is ended only when what it holds is committed."""
    claims = [e for e in before.entries() if isinstance(e, Claim)]
    for pod in before.pods:
        now = after.pod(pod.snap.place)
        ends = pod.snap.work in LIVING and now is not None and now.up and now.snap.work == OVER
        newest = claims and pod.snap.epoch == claims[-1].epoch
        if not ends or not newest or pod.snap.place in before.gone | before.given_up:
            continue
        kept = (held[: len(pod.history)] for _, held in before.content)
        if pod.history not in (*kept, ()):
            return f"{pod.snap.place} is ended with step {pod.snap.step}, which is not committed"
    return ""

"""Every order of what can happen, breadth first; the first broken invariant comes with its story.

Without a bound every order is visited. With one, everything happens at once and in one order, but for
as many delays as the bound says: a delay holds one move back for as long as one likes, or lets one
overtake what is quicker. Faults strike at any time and cost nothing. So a search goes through whole
jobs of three and four slots, and says how many delays it has seen through.
"""

import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from simulation.protocol.rules import Move

Held = frozenset[tuple[Any, ...]]
State = tuple[Any, Held]
NOTHING: Held = frozenset()


class Model(Protocol):
    def moves(self, world: Any) -> list[Move]: ...
    def events(self, world: Any) -> list[Move]: ...
    def check(self, before: Any, move: Move) -> str: ...
    def is_done(self, world: Any) -> bool: ...


@dataclass(slots=True)
class Found:
    states: int = 0
    moves: int = 0
    depth: int = 0
    delays: int = -1
    """All that happens with this many delays was visited."""
    complete: bool = False
    """Every reachable state was visited (up to the bound of delays)."""
    broken: str = ""
    story: list[str] = field(default_factory=list)
    finished: int = 0
    """States in which the run has reached its end."""
    fair: int = 0
    """States from which a fair run was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    delays: int | None = None
    """None: every order."""
    states: int = 1_000_000
    seconds: float = 60.0
    fair_every: int = 50
    """Of how many states one is run on fairly, without faults, until the run is done."""


def search(model: Model, first: Any, bounds: Bounds) -> Found:
    found, until = Found(), time.monotonic() + bounds.seconds
    start: State = (first, NOTHING)
    came: dict[int, int] = {hash(start): 0}
    layers: list[deque[tuple[State, int]]] = [deque([(start, 0)])]
    for delays in range((bounds.delays or 0) + 1):
        if len(layers) <= delays:
            break
        layers.append(deque())
        if not _visit(model, layers[delays], layers[delays + 1], came, found, bounds, until):
            break
        found.delays = delays
    else:
        found.complete = True
    found.complete = found.complete or (found.delays >= 0 and not any(layers))
    found.states = len(came)
    if found.broken:
        found.story = _retell(model, start, came, found.story, bounds)
    return found


def _visit(
    model: Model,
    queue: deque[tuple[State, int]],
    later: deque[tuple[State, int]],
    came: dict[int, int],
    found: Found,
    bounds: Bounds,
    until: float,
) -> bool:
    """All states that need no further delay; whether all of them were seen and nothing is broken."""
    while queue:
        state, depth = queue.popleft()
        here = hash(state)
        found.depth = max(found.depth, depth)
        if model.is_done(state[0]):
            found.finished += 1
            continue
        if bounds.fair_every and found.moves % bounds.fair_every == 0:
            found.fair += 1
            if stuck := run_fairly(model, state[0]):
                found.broken, found.story = stuck, [str(here)]
                return False
        for move, after, cost in _successors(model, state, bounded=bounds.delays is not None):
            found.moves += 1
            number = hash(after)
            if number in came:
                continue
            came[number] = here
            if move is not None and (problem := model.check(state[0], move)):
                found.broken, found.story = problem, [str(number)]
                return False
            (later if cost else queue).append((after, depth + 1))
        if len(came) > bounds.states or time.monotonic() > until:
            return False
    return True


def _successors(
    model: Model, state: State, *, bounded: bool
) -> Iterator[tuple[Move | None, State, int]]:
    """(move, state after it, delays that it costs)"""
    world, held = state
    moves = model.moves(world)
    for event in model.events(world):
        yield event, (event.after, held), 0
    if not bounded:
        for move in moves:
            yield move, (move.after, NOTHING), 0
        return
    held &= {m.key for m in moves}
    free = [m for m in moves if m.key not in held] or moves
    for at, move in enumerate(free):
        yield move, (move.after, held - {move.key}), 1 if at else 0
    for move in moves:
        if move.key in held and free is not moves:
            yield move, (move.after, held - {move.key}), 0
    if len(free) > 1 or held:
        yield None, (world, held | {free[0].key}), 1


def run_fairly(model: Model, world: Any, limit: int = 400) -> str:
    """Without further faults and with every move getting its turn, the run reaches its end."""
    turns: dict[tuple[Any, ...], int] = {}
    story: deque[str] = deque(maxlen=24)
    for turn in range(limit):
        if model.is_done(world):
            return ""
        moves = [*model.moves(world), *(e for e in model.events(world) if heals(e))]
        if not moves:
            return "nothing can happen any more: " + "; ".join(story)
        move = min(moves, key=lambda m: turns.get(m.key, -1))
        turns[move.key] = turn
        story.append(str(move))
        if problem := model.check(world, move):
            return f"{problem} (in a fair run: {'; '.join(story)})"
        world = move.after
    return f"no end after {limit} fair moves: " + "; ".join(story)


def heals(event: Move) -> bool:
    """What heals by itself."""
    return event.kind in ("reach each other again", "goes on again", "hears, late, of")


def _retell(
    model: Model, start: State, came: dict[int, int], last: list[str], bounds: Bounds
) -> list[str]:
    """The moves that lead to a state, by the hashes of those on the way."""
    path, at = [], int(last[0])
    while at != hash(start):
        path.append(at)
        at = came[at]
    state, told = start, []
    for number in reversed(path):
        for move, after, _ in _successors(model, state, bounded=bounds.delays is not None):
            if hash(after) == number:
                told += [str(move)] if move is not None else ["(something waits)"]
                state = after
                break
    return told


@dataclass(slots=True)
class Walked:
    walks: int = 0
    moves: int = 0
    broken: str = ""
    story: list[str] = field(default_factory=list)


def walk(model: Model, start: Any, seed: int, *, walks: int, seconds: float, length: int) -> Walked:
    """Walks at random, each `length` moves far and then fairly to the end; deeper than any search."""
    found, until = Walked(), time.monotonic() + seconds
    while found.walks < walks and time.monotonic() < until and not found.broken:
        chance = random.Random(seed + found.walks)
        world, told = start, []
        for _ in range(length):
            moves, events = model.moves(world), model.events(world)
            if model.is_done(world) or not (moves or events):
                break
            strikes = events and (not moves or chance.random() < STRIKES)
            move = chance.choice(events if strikes else moves)
            told.append(str(move))
            found.moves += 1
            found.broken = model.check(world, move)
            if found.broken:
                break
            world = move.after
        found.broken = found.broken or run_fairly(model, world)
        found.story = [f"seed {seed + found.walks}", *told] if found.broken else []
        found.walks += 1
    return found


STRIKES = 0.08
"""Share of the moves of a walk that are faults, while there are any left."""

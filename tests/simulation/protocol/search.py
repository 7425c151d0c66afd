"""Breadth-first search through every order of events. The first broken invariant is reported with
the moves that led to it.

Without a bound the search visits every order. With a bound, everything happens at once and in one
order, except for as many delays as the bound allows. A delay holds one move back for any time, or
lets a move overtake quicker ones. Faults strike at any time and cost no delay. In this way a search
goes through complete jobs of three and four slots, and reports up to how many delays it has visited
everything.
"""

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from simulation.protocol.rules import BACK, Move

Held = frozenset[tuple[Any, ...]]
State = tuple[Any, Held]
NOTHING: Held = frozenset()


class Model(Protocol):
    def moves(self, world: Any) -> list[Move]: ...
    def events(self, world: Any) -> list[Move]: ...
    def check(self, before: Any, move: Move) -> str: ...
    def is_done(self, world: Any) -> bool: ...


@runtime_checkable
class Quick(Model, Protocol):
    """A model that can build its first move without the others."""

    def first_move(self, world: Any) -> Move | None: ...


@dataclass(slots=True)
class Found:
    states: int = 0
    moves: int = 0
    depth: int = 0
    delays: int = -1
    """Everything that can happen with this many delays was visited."""
    complete: bool = False
    """Every reachable state was visited (up to the bound of delays)."""
    broken: str = ""
    story: list[str] = field(default_factory=list)
    visited: int = 0
    """States whose moves were all tried."""
    finished: int = 0
    """How many moves led to the run's end."""
    fair: int = 0
    """States from which a fair run was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    delays: int | None = None
    """None: every order."""
    states: int = 1_000_000
    seconds: float = 60.0
    """CPU seconds of this process: the coverage does not depend on who else uses the machine."""
    fair_every: int = 50
    """From one in this many states, a fair run without faults continues until the run is done."""


def search(model: Model, first: Any, bounds: Bounds) -> Found:
    return _Search(model, (first, NOTHING), bounds).run()


class _Search:
    """Searches layer by layer: first all that needs no delay, then all that needs one, and so on.

    A state belongs to the first layer in which it can be reached. So a path that costs a delay does
    not mark the state as visited: a cheaper path to it may come later in the same layer.
    """

    def __init__(self, model: Model, start: State, bounds: Bounds) -> None:
        self.model, self.start, self.bounds = model, start, bounds
        self.found = Found()
        self.came: dict[int, int] = {}
        """Hash of each state → hash of the state from which it was reached."""
        bounded = bounds.delays is not None
        self.quick = model if bounded and isinstance(model, Quick) else None
        self.until = time.process_time() + bounds.seconds

    def run(self) -> Found:
        layer: dict[int, tuple[State, int, int]] = {hash(self.start): (self.start, 0, 0)}
        for delays in range((self.bounds.delays or 0) + 1):
            later = {} if delays < (self.bounds.delays or 0) else None
            if not self._visit(layer, later):
                break
            self.found.delays = delays
            if not later:
                self.found.complete = True
                break
            layer = later
        self.found.states = len(self.came)
        if self.found.broken:
            self.found.story = _retell(
                self.model, self.start, self.came, self.found.story, self.bounds
            )
        return self.found

    def _visit(
        self,
        layer: dict[int, tuple[State, int, int]],
        later: dict[int, tuple[State, int, int]] | None,
    ) -> bool:
        """Visit a layer. Returns whether all its states were seen and nothing is broken.

        `layer`: hash → (state, depth, hash of the state before it); `later`: collects the states
        that need one more delay, None if no delay is left.
        """
        queue: deque[tuple[State, int]] = deque()
        for number, (state, depth, here) in layer.items():
            if number not in self.came:
                self.came[number] = here
                queue.append((state, depth))
        while queue:
            state, depth = queue.popleft()
            if not self._visit_one(state, depth, queue, later):
                return False
            if len(self.came) > self.bounds.states or time.process_time() > self.until:
                return False
        return True

    def _visit_one(
        self,
        state: State,
        depth: int,
        queue: deque[tuple[State, int]],
        later: dict[int, tuple[State, int, int]] | None,
    ) -> bool:
        found, here = self.found, hash(state)
        found.depth, found.visited = max(found.depth, depth), found.visited + 1
        if not self._ends_fairly(state, here):
            return False
        for move, after, cost in self._list_next(state, later is None):
            if cost and later is None:
                continue
            found.moves += 1
            number = hash(after)
            if number in self.came or (cost and later is not None and number in later):
                continue
            if move is not None and (problem := self.model.check(state[0], move)):
                self.came[number] = here
                found.broken, found.story = problem, [str(number)]
                return False
            if move is not None and self.model.is_done(after[0]):
                found.finished += 1  # nothing follows, so there is nothing to remember
            elif cost and later is not None:
                later[number] = (after, depth + 1, here)
            else:
                self.came[number] = here
                queue.append((after, depth + 1))
        return True

    def _list_next(self, state: State, last: bool) -> Iterable[tuple[Move | None, State, int]]:
        """The states that can follow. In the last layer no delay is left. So if nothing is held
        back, only faults and one move can follow.
        """
        if last and self.quick is not None and not state[1]:
            return _first_successors(self.quick, state[0])
        return _successors(self.model, state, self.bounds.delays is not None)

    def _ends_fairly(self, state: State, here: int) -> bool:
        """Whether a fair run from this state reaches the end. Tried from the first state, and from
        every n-th.
        """
        every, found = self.bounds.fair_every, self.found
        if not every or found.visited % every != 1 % every:
            return True
        found.fair += 1
        if stuck := run_fairly(self.model, state[0]):
            found.broken, found.story = stuck, [str(here)]
        return not found.broken


def _first_successors(model: "Quick", world: Any) -> Iterator[tuple[Move | None, State, int]]:
    """The results of `_successors` that cost no delay, for a state that holds nothing back."""
    for event in model.events(world):
        yield event, (event.after, NOTHING), 0
    if (move := model.first_move(world)) is not None:
        yield move, (move.after, NOTHING), 0


def _successors(
    model: Model, state: State, bounded: bool
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
    """Continue without further faults, with every move getting its turn. Returns an empty string if
    the run reaches its end, else the problem.
    """
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
    """Whether the event is a recovery that happens by itself."""
    return event.kind in ("reach each other again", "goes on again", "hears, late, of", BACK)


def _retell(
    model: Model, start: State, came: dict[int, int], last: list[str], bounds: Bounds
) -> list[str]:
    """The moves that lead to a state, found by the hashes of the states on the way."""
    path, at = [], int(last[0])
    while at != hash(start):
        path.append(at)
        at = came[at]
    state, told = start, []
    for number in reversed(path):
        for move, after, _ in _successors(model, state, bounds.delays is not None):
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
    """Random walks, each of `length` moves and then run fairly to the end. They go deeper than any
    search.
    """
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
"""Share of a walk's moves that are faults, while any are left."""

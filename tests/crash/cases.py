"""One case: a scenario and one of its writes, at which the operator dies or the answer is lost."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from crash.lane import Lane, NotReached
from crash.nursery import Operator
from crash.plan import AFTER, BEFORE, Case, Clean, Write, list_writes, merge
from crash.proxy import Answer, Call, Fault, HungUp, Proxy, build_refusal
from crash.scenarios import SCENARIOS
from crash.shape import Shape, describe_difference
from journal import Journal

Turn = TypeVar("Turn")
QUIET_SECONDS = 2.0
SETTLE_SECONDS = 45.0
PLAYS = 2
"""Plays of a case before its write may be changed. Cases on other lanes crash the same operator,
which may change the order of its writes, so a write may not come. Then `choose_write` chooses the
write for one more play. If that does not come either, the case has shown only that the scenario
reaches the right end state. `conclude` limits the number of such cases.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: Case
    met: str
    """The write that was hit; "" if the scenario ended without it."""
    problem: str
    seconds: float
    plays: int = 1


@dataclass(slots=True)
class CrashPoint(Fault):
    """Records the lane's writes and injects the fault at one of them, once."""

    lane: Lane
    operator: Operator
    write: Write | None = None
    moment: str = BEFORE
    writes: list[str] = field(default_factory=list)
    written_at: float = 0.0
    met: str = ""
    _due: Call | None = None

    async def refuse(self, call: Call) -> Answer | None:
        if not call.writes or not self.lane.concerns(call):
            return None
        title = self.lane.title_of(call)
        self.writes.append(title)
        self.written_at = time.monotonic()
        if self._due is None and self.write == Write(
            title=title, occurrence=self.writes.count(title)
        ):
            self._due = call
            if self.moment == BEFORE:
                await self._crash(call)
        return None

    async def answer(self, call: Call, answer: Answer) -> Answer:
        if call is not self._due or self.met:
            return answer
        if self.moment == AFTER:
            await self._crash(call)
        self.met = f"{self.lane.title_of(call)}: {answer.status}"
        return build_refusal(500, "InternalError", "the answer was lost on its way")

    async def _crash(self, call: Call) -> None:
        """Kill the replica that made the write: the leader."""
        self.met = self.lane.title_of(call)
        await self.operator.crash(call.caller)
        raise HungUp


class Runner:
    """Runs cases side by side, one at a time on each lane. A crash for one lane's case also affects
    the cases on the other lanes.
    """

    def __init__(
        self,
        proxy: Proxy,
        operator: Operator,
        lanes: Sequence[Lane],
        clean: dict[str, Clean] | None = None,
    ) -> None:
        self._proxy, self._operator, self._lanes = proxy, operator, lanes
        self.clean = {} if clean is None else clean
        """Filled by `run_clean`."""
        self.results: list[Result] = []

    async def run_clean(self, names: Sequence[str], plays: int = 1) -> None:
        """Play each scenario undisturbed, on the lanes side by side. Raises `NotReached` if two
        plays of a scenario end differently.
        """
        played: dict[str, list[Clean]] = {n: [] for n in names if n not in self.clean}

        async def play(lane: Lane, turn: tuple[str, int]) -> None:
            name, number = turn
            point, began = CrashPoint(lane, self._operator), time.monotonic()
            shape = await self._play(lane, f"{name}-clean-{number}", name, point, None)
            played[name].append(
                Clean(
                    shape=shape, writes=list_writes(point.writes), seconds=time.monotonic() - began
                )
            )

        await self._on_lanes([(name, i) for i in range(plays) for name in played], play)
        self.clean |= {name: merge(name, found) for name, found in played.items()}

    async def run(
        self, cases: Sequence[Case], keep: Callable[[Result], None] = lambda result: None
    ) -> None:
        """Run all cases; `keep` gets each result as soon as it is known."""

        async def work(lane: Lane, case: Case) -> None:
            result = await self._run_one(lane, case)
            self.results.append(result)
            keep(result)
            print(describe(result), flush=True)

        await self._on_lanes(cases, work)

    async def _on_lanes(
        self, turns: Sequence[Turn], work: Callable[[Lane, Turn], Awaitable[None]]
    ) -> None:
        waiting = list(turns)

        async def keep_busy(lane: Lane) -> None:
            while waiting:
                await work(lane, waiting.pop(0))

        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(keep_busy(lane))

    async def _run_one(self, lane: Lane, case: Case) -> Result:
        began, met, problem = time.monotonic(), "", ""
        played: list[CrashPoint] = []
        while not met and not problem and len(played) < (PLAYS + 1 if case.write else 1):
            write = choose_write(case.write, [point.writes for point in played])
            point = CrashPoint(lane, self._operator, write, case.moment)
            name = f"{case.name}-{len(played) + 1}" if played else case.name
            try:
                clean = self.clean[case.scenario].shape
                await self._play(lane, name, case.scenario, point, clean)
            except NotReached as error:
                problem = str(error)
            met = point.met
            played.append(point)
        seconds = time.monotonic() - began
        return Result(case=case, met=met, problem=problem, seconds=seconds, plays=len(played))

    async def _play(
        self, lane: Lane, job: str, scenario: str, point: CrashPoint, clean: Shape | None
    ) -> Shape:
        self._proxy.faults.append(point)
        try:
            await SCENARIOS[scenario](lane, job)
            shape = await _settle(lane, point, clean)
            if clean is not None and shape != clean:
                different = describe_difference(clean, shape)
                raise NotReached(
                    f"ended elsewhere:\n{different}\n{await lane.describe_incidents()}"
                )
            return shape
        finally:
            try:
                await lane.end()
            finally:
                self._proxy.faults.remove(point)


async def _settle(lane: Lane, point: CrashPoint, clean: Shape | None) -> Shape:
    """Wait until the job has the expected shape, if one is given, and nothing has been written for
    a while, or until time is up. Returns the shape; raises `NotReached` if writes still come then.
    """
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        quiet = time.monotonic() - point.written_at > QUIET_SECONDS
        shape = await lane.shape()
        if quiet and clean in (None, shape):
            return shape
        if time.monotonic() > end:
            if not quiet:
                raise NotReached(f"it goes on writing: {point.writes[-6:]}")
            return shape
        await asyncio.sleep(0.3)


def choose_write(write: Write | None, played: Sequence[Sequence[str]]) -> Write | None:
    """Choose the write for the next play's fault. A busy machine retries a write more often, so an
    occurrence may not come again. If `PLAYS` plays did not reach it, choose the last occurrence
    that all of them reached.
    """
    if write is None or len(played) < PLAYS:
        return write
    least = min(titles.count(write.title) for titles in played)
    return replace(write, occurrence=least) if 0 < least < write.occurrence else write


def describe(result: Result) -> str:
    end = f"FAILED: {result.problem}" if result.problem else "same place"
    if result.case.write and not result.met and not result.problem:
        end = "same place, but the write did not come"
    again = f", {result.plays} plays" if result.plays > 1 else ""
    return f"{result.case.name} ({result.met or 'no write'}{again}): {end}, {result.seconds:.1f} s"


def keep_result(journal: Journal, result: Result) -> None:
    journal.keep(
        result.case.name,
        met=result.met,
        problem=result.problem,
        seconds=round(result.seconds, 1),
        plays=result.plays,
    )

"""One case: a scenario, and the operator that dies at one of the writes that it makes for it."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crash.lane import Lane, NotReached
from crash.nursery import Operator
from crash.proxy import Answer, Call, Fault, HungUp, Proxy, build_refusal
from crash.scenarios import SCENARIOS
from crash.shape import Shape, describe_difference

BEFORE, AFTER, LOST = "before", "after", "lost"
MOMENTS = (BEFORE, AFTER, LOST)
"""SIGKILL before the API server hears of the write; once it is done and before the answer; done, and
the operator, alive, is told that it failed."""
QUIET_SECONDS = 2.0
SETTLE_SECONDS = 45.0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Case:
    scenario: str
    number: int
    """Of the write, from 1, among those for this job and its nodes; 0: nothing is done to it."""
    moment: str

    @property
    def name(self) -> str:
        return f"{self.scenario}-{self.number}-{self.moment}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """The scenario undisturbed."""

    shape: Shape
    writes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: Case
    met: str
    """The write at which it happened; "" if the scenario ended with fewer."""
    problem: str
    seconds: float


@dataclass(slots=True)
class CrashPoint(Fault):
    """Counts the lane's writes and strikes at one of them, once."""

    lane: Lane
    operator: Operator
    number: int = 0
    moment: str = BEFORE
    writes: list[str] = field(default_factory=list)
    written_at: float = 0.0
    met: str = ""

    async def refuse(self, call: Call) -> Answer | None:
        if not call.writes or not self.lane.concerns(call):
            return None
        self.writes.append(call.title)
        self.written_at = time.monotonic()
        if self.moment == BEFORE and self._is_due(call):
            await self._crash(call)
        return None

    async def answer(self, call: Call, answer: Answer) -> Answer:
        if not call.writes or self.moment == BEFORE or not self._is_due(call):
            return answer
        if self.moment == AFTER:
            await self._crash(call)
        self.met = f"{call.title}: {answer.status}"
        return build_refusal(500, "InternalError", "the answer was lost on its way")

    def _is_due(self, call: Call) -> bool:
        """The write that was counted last is the one to strike at: answers come in any order, so by title."""
        due = len(self.writes) >= self.number > 0 and not self.met
        return due and self.writes[self.number - 1] == call.title

    async def _crash(self, call: Call) -> None:
        self.met = call.title
        await self.operator.crash()
        raise HungUp


class Runner:
    """Cases on lanes, side by side. A crash for one lane's case is a crash for the others', too."""

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

    async def run_clean(self, names: Sequence[str]) -> None:
        """Each scenario once with nothing in its way, on the lanes side by side; counts the writes."""
        waiting = [name for name in names if name not in self.clean]

        async def work(lane: Lane) -> None:
            while waiting:
                name = waiting.pop(0)
                point = CrashPoint(lane, self._operator)
                began = time.monotonic()
                shape = await self._play(lane, f"{name}-clean", name, point, None)
                self.clean[name] = Clean(
                    shape=shape, writes=tuple(point.writes), seconds=time.monotonic() - began
                )

        await _together([work(lane) for lane in self._lanes])

    async def run(self, cases: Sequence[Case], until: float) -> None:
        """In this order, until the moment on the monotonic clock: what was begun is ended."""
        waiting = list(cases)

        async def work(lane: Lane) -> None:
            while waiting and time.monotonic() < until:
                result = await self._run_one(lane, waiting.pop(0))
                self.results.append(result)
                print(describe(result), flush=True)

        await _together([work(lane) for lane in self._lanes])

    async def _run_one(self, lane: Lane, case: Case) -> Result:
        began = time.monotonic()
        point = CrashPoint(lane, self._operator, case.number, case.moment)
        problem = ""
        try:
            await self._play(lane, case.name, case.scenario, point, self.clean[case.scenario].shape)
        except NotReached as error:
            problem = str(error)
        return Result(case=case, met=point.met, problem=problem, seconds=time.monotonic() - began)

    async def _play(
        self, lane: Lane, job: str, scenario: str, point: CrashPoint, clean: Shape | None
    ) -> Shape:
        self._proxy.faults.append(point)
        try:
            await SCENARIOS[scenario](lane, job)
            shape = await _settle(lane, point, clean)
            if clean is not None and shape != clean:
                raise NotReached(f"ended elsewhere:\n{describe_difference(clean, shape)}")
            return shape
        finally:
            try:
                await lane.end()
            finally:
                self._proxy.faults.remove(point)


async def _settle(lane: Lane, point: CrashPoint, clean: Shape | None) -> Shape:
    """Once it is where it should be and nothing has been written for a while; or when time is up."""
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


async def _together(work: Sequence[object]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)  # type: ignore[arg-type]


def build_cases(clean: Mapping[str, Clean], seed: int) -> list[Case]:
    """Every write of every scenario at every moment, in an order that the seed draws."""
    cases = [
        Case(scenario=name, number=number, moment=moment)
        for name, found in sorted(clean.items())
        for number in range(1, len(found.writes) + 1)
        for moment in MOMENTS
    ]
    random.Random(seed).shuffle(cases)
    return cases


def describe(result: Result) -> str:
    case = result.case
    end = f"FAILED: {result.problem}" if result.problem else "same place"
    met = result.met or "not reached"
    return (
        f"{case.scenario} {case.moment} write {case.number} ({met}): {end}, {result.seconds:.1f} s"
    )

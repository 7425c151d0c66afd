"""What a failing network, proxy or API server does to calls and watches, for as long as the trouble
is switched on.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from crash.proxy import Answer, Call, Fault, HungUp, build_refusal, build_status

Which = Callable[[Call], bool]


def writes(call: Call) -> bool:
    return call.writes


def reads(call: Call) -> bool:
    return not call.writes and not call.watches


def watches(call: Call) -> bool:
    return call.watches


def everything(call: Call) -> bool:
    return True


def status_patches(call: Call) -> bool:
    return call.method == "PATCH" and call.bare.endswith("/status")


@dataclass(slots=True)
class Trouble(Fault):
    """Strikes the first call or event that it concerns, then a random `share` of them, drawn from
    `chance`.
    """

    chance: random.Random
    share: float = 0.3
    on: bool = True
    struck: int = 0

    def strikes(self) -> bool:
        hit = self.on and (not self.struck or self.chance.random() < self.share)
        self.struck += hit
        return hit


@dataclass(slots=True)
class Refused(Trouble):
    """The call is answered with an error; with `applied`, after the API server has carried it out."""

    which: Which = everything
    status: int = 500
    reason: str = "InternalError"
    headers: dict[str, str] = field(default_factory=dict)
    applied: bool = False

    async def refuse(self, call: Call) -> Answer | None:
        if self.applied or not self.which(call) or not self.strikes():
            return None
        return self._answer()

    async def answer(self, call: Call, answer: Answer) -> Answer:
        if not self.applied or not self.which(call) or not self.strikes():
            return answer
        return self._answer()

    def _answer(self) -> Answer:
        return build_refusal(self.status, self.reason, "as the test has it", **self.headers)


@dataclass(slots=True)
class Garbled(Trouble):
    """The answer to a call is cut off in the middle, or is not JSON."""

    which: Which = everything

    async def answer(self, call: Call, answer: Answer) -> Answer:
        if not self.which(call) or not self.strikes():
            return answer
        body = answer.body[: len(answer.body) // 2] if self.struck % 2 else b"<html>502</html>"
        return Answer(status=answer.status, body=body, headers={"Content-Type": "text/html"})


@dataclass(slots=True)
class Broken(Trouble):
    """The call is carried out, but the connection breaks after `seconds` without an answer."""

    which: Which = everything
    seconds: float = 1.0

    async def answer(self, call: Call, answer: Answer) -> Answer:
        if self.which(call) and self.strikes():
            await asyncio.sleep(self.seconds)
            raise HungUp
        return answer


@dataclass(slots=True)
class Away(Trouble):
    """The API server is unavailable: no call is answered, and watches break."""

    share: float = 1.0

    async def refuse(self, call: Call) -> Answer | None:
        if self.on:
            self.struck += 1
            raise HungUp
        return None

    async def lines(self, call: Call, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        reading = asyncio.ensure_future(anext(lines, None))
        try:
            while not self.on:
                done, _ = await asyncio.wait({reading}, timeout=0.2)
                if not done:
                    continue
                if (line := reading.result()) is None:
                    return
                yield line
                reading = asyncio.ensure_future(anext(lines, None))
            raise HungUp
        finally:
            reading.cancel()


@dataclass(slots=True)
class Dropped(Trouble):
    """Some events of a watch never arrive."""

    async def lines(self, call: Call, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if not self.strikes():
                yield line


@dataclass(slots=True)
class Repeated(Trouble):
    """Some events arrive twice, and old ones arrive again."""

    async def lines(self, call: Call, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        old: list[bytes] = []
        async for line in lines:
            yield line
            if b'"BOOKMARK"' in line:
                continue
            old.append(line)
            if self.strikes():
                yield line
                yield self.chance.choice(old)


@dataclass(slots=True)
class Late(Trouble):
    """Some events are held back for up to `seconds`, so that other kinds overtake them."""

    seconds: float = 3.0

    async def lines(self, call: Call, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if self.strikes():
                await asyncio.sleep(self.chance.uniform(0, self.seconds))
            yield line


@dataclass(slots=True)
class Failing(Trouble):
    """A watch ends: with an ERROR event with this `code`, in the middle of a line (`code` 0), or as
    if the server had closed it (-1).
    """

    code: int = 410

    async def lines(self, call: Call, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if not self.strikes():
                yield line
            elif self.code > 0:
                error = json.loads(build_status(self.code, "Expired", "as the test has it"))
                yield json.dumps({"type": "ERROR", "object": error}).encode() + b"\n"
                return
            elif self.code == 0:
                yield line[: len(line) // 2]
                raise HungUp
            else:
                return


@dataclass(slots=True)
class Stale(Trouble):
    """Lists are answered as they were last read before `frozen` was set."""

    share: float = 1.0
    on: bool = False
    frozen: bool = False
    kept: dict[str, Answer] = field(default_factory=dict)

    async def refuse(self, call: Call) -> Answer | None:
        if self.on and reads(call) and call.path in self.kept:
            self.struck += 1
            return self.kept[call.path]
        return None

    async def answer(self, call: Call, answer: Answer) -> Answer:
        listed = reads(call) and answer.status == 200 and b'List"' in answer.body[:200]
        if listed and not self.frozen:
            self.kept[call.path] = answer
        return answer


@dataclass(slots=True)
class Silent(Trouble):
    """Watches that are open when `hush` is called deliver nothing from then on; later ones do."""

    hushed: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    made: int = 0

    def hush(self) -> None:
        self.hushed |= self.open

    async def lines(self, call: Call, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.made += 1
        number = self.made
        self.open.add(number)
        try:
            async for line in lines:
                if number not in self.hushed:
                    yield line
        finally:
            self.open.discard(number)

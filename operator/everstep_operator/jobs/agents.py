"""The operator's half of the two level documents: posts `Wanted`, keeps the newest `Seen`. Never
blocks a pass.

One task a job goes round its agents every second. Each pod has a connection of its own, for the
nonce belongs to the connection. What a pass has decided is told until the next pass decides
otherwise.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import aiohttp

from everstep_contract import auth, codec
from everstep_contract.levels import Peer, Seen, SlotAttempt, Wanted

Key = tuple[str, str]
TIMEOUT = aiohttp.ClientTimeout(total=3.0, connect=1.5)
LIMIT_BYTES = 1 << 20
ASKED_AT_ONCE = 32
"""Any agent passes on the coordinator's word, so a large job is asked in part, in turn."""
ASKED_WHILE_QUIET = 4
"""Of a job that trains and has heard all: its coordinator and some others in turn."""
WANTED_PATH = "/v1/wanted"
NONCE_PATH = "/v1/nonce"

log = logging.getLogger(__name__)


class Unanswered(Exception):
    """The agent cannot be reached, or does not speak our protocol."""


class Line:
    """One agent: one connection, its nonce, a growing counter."""

    def __init__(self, address: str, token: str) -> None:
        self._base = f"http://{address}"
        self._signer = auth.Signer(token)
        self._has_nonce = False
        self._session: aiohttp.ClientSession | None = None
        self.answered = False
        self.revision = 0
        """Of the newest document that it has taken."""
        self.since = time.monotonic()
        self.failure = ""

    async def ask(self, body: bytes) -> Seen:
        """Raises `Unanswered`."""
        try:
            return await self._ask(body)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            await self.close()
            raise Unanswered(f"{type(error).__name__}: {error}") from error

    async def _ask(self, body: bytes) -> Seen:
        session = self._open()
        if not self._has_nonce:
            async with session.get(self._base + NONCE_PATH) as answer:
                answer.raise_for_status()
                self._renew((await answer.json())["nonce"])
        for _ in range(2):
            headers = self._signer.headers("POST", WANTED_PATH, body)
            headers["Content-Type"] = "application/json"
            async with session.post(self._base + WANTED_PATH, data=body, headers=headers) as answer:
                if answer.status == 401 and auth.HEADER_NONCE in answer.headers:
                    self._renew(answer.headers[auth.HEADER_NONCE])
                    continue
                answer.raise_for_status()
                raw = await answer.content.read(LIMIT_BYTES)
                return codec.loads(Seen, raw)
        raise Unanswered("the agent refuses our token: was the operator's key changed?")

    def _renew(self, nonce: str) -> None:
        self._signer.renew(nonce)
        self._has_nonce = True

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)
        return self._session

    async def close(self) -> None:
        session, self._session, self._has_nonce = self._session, None, False
        if session is not None:
            await session.close()


@dataclass(slots=True)
class Dialogue:
    """What is said to one job and what it said last."""

    token: str
    wanted: Wanted
    pods: dict[str, str]
    """Address → pod UID."""
    lines: dict[str, Line] = field(default_factory=dict)
    seen: Seen | None = None
    seen_at: float = 0.0
    """Monotonic moment at which its figures were fresh."""
    task: asyncio.Task[None] | None = None
    turn: int = 0
    stirred: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a pass gets to know."""

    seen: Seen | None
    age: float
    callers: frozenset[str]
    asked_for: dict[str, float]


class Agents:
    """All dialogues. `heard` is called with a job's key when its word has changed in anything but figures."""

    def __init__(
        self,
        heard: Callable[[Key], None],
        interval: float = 1.0,
        may_speak: Callable[[], bool] = lambda: True,
    ) -> None:
        self._heard, self._interval = heard, interval
        self._may_speak = may_speak
        """False: another operator may be speaking to the job by now."""
        self._dialogues: dict[Key, Dialogue] = {}
        self._revision = 0

    def tell(self, key: Key, token: str, wanted: Wanted, pods: dict[str, str]) -> None:
        """From now on the job is told this; `pods` maps addresses to pod UIDs."""
        held = self._dialogues.get(key)
        if held is None or held.token != token:
            self.forget(key)
            held = Dialogue(token=token, wanted=self._numbered(wanted), pods=pods)
            held.task = asyncio.create_task(self._run(key, held), name=f"agents {key[0]}/{key[1]}")
            self._dialogues[key] = held
            return
        held.pods = pods
        if replace(held.wanted, revision=0) != replace(wanted, revision=0):
            held.wanted = self._numbered(wanted)
            held.stirred.set()

    def _numbered(self, wanted: Wanted) -> Wanted:
        """Revisions grow over restarts of the operator, too: they begin at the clock."""
        self._revision = max(self._revision + 1, time.time_ns() // 1_000_000)
        return replace(wanted, revision=self._revision)

    def word_of(self, key: Key) -> Word:
        held = self._dialogues.get(key)
        if held is None:
            return Word(seen=None, age=0.0, callers=frozenset(), asked_for={})
        now = time.monotonic()
        lines = {uid: held.lines[a] for a, uid in held.pods.items() if a in held.lines}
        return Word(
            seen=held.seen,
            age=now - held.seen_at if held.seen else 0.0,
            callers=frozenset(uid for uid, line in lines.items() if line.answered),
            asked_for={uid: now - line.since for uid, line in lines.items()},
        )

    def forget(self, key: Key) -> None:
        held = self._dialogues.pop(key, None)
        if held is not None and held.task is not None:
            held.task.cancel()

    async def close(self) -> None:
        tasks = [d.task for d in self._dialogues.values() if d.task]
        for key in list(self._dialogues):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: Key, held: Dialogue) -> None:
        try:
            while True:
                held.stirred.clear()
                if self._may_speak():
                    await self._round(key, held)
                try:
                    async with asyncio.timeout(self._interval):
                        await held.stirred.wait()
                except TimeoutError:
                    pass
        finally:
            for line in held.lines.values():
                await line.close()

    async def _round(self, key: Key, held: Dialogue) -> None:
        for address in [a for a in held.lines if a not in held.pods]:
            await held.lines.pop(address).close()
        addresses = choose_addresses(list(held.pods), held.turn, _quiet_coordinator(held))
        held.turn += 1
        body = codec.dumps(held.wanted)
        answers = await asyncio.gather(*(self._ask(held, a, body) for a in addresses))
        words = [(seen, at) for seen, at in answers if seen is not None]
        if words:
            self._keep(key, held, *choose_word(words))

    async def _ask(self, held: Dialogue, address: str, body: bytes) -> tuple[Seen | None, float]:
        line = held.lines.setdefault(address, Line(address, held.token))
        revision = held.wanted.revision
        try:
            seen = await line.ask(body)
        except Unanswered as error:
            if str(error) != line.failure:
                log.info("agent %s does not answer: %s", address, error)
            line.failure = str(error)
            return None, 0.0
        line.answered, line.failure, line.revision = True, "", revision
        return seen, time.monotonic() - seen.age_ms / 1000

    def _keep(self, key: Key, held: Dialogue, seen: Seen, at: float) -> None:
        if held.seen is not None and seen.epoch < held.seen.epoch and not seen.done:
            log.info("%s/%s: a word of epoch %d, older than %d", *key, seen.epoch, held.seen.epoch)
            return
        news = held.seen is None or without_figures(seen) != without_figures(held.seen)
        held.seen, held.seen_at = seen, at
        if news:
            self._heard(key)


def choose_addresses(addresses: list[str], turn: int, coordinator: str | None) -> list[str]:
    """All of a small job; of a large one a window that moves on. `coordinator`: given while all is
    quiet; then it and a narrow window are enough.
    """
    at_once = ASKED_AT_ONCE if coordinator is None else ASKED_WHILE_QUIET
    if len(addresses) <= at_once:
        return addresses
    if coordinator is None:
        return _window(addresses, turn, at_once)
    others = [address for address in addresses if address != coordinator]
    return [coordinator, *_window(others, turn, at_once - 1)]


def _window(addresses: list[str], turn: int, width: int) -> list[str]:
    start = turn * width % len(addresses)
    return (addresses + addresses)[start : start + width]


def _quiet_coordinator(held: Dialogue) -> str | None:
    """The coordinator's address, if the job trains, nothing is open and every agent has taken the newest
    document; else None.
    """
    seen = held.seen
    if seen is None or not seen.running or any(i.open for i in seen.incidents):
        return None
    lines = [held.lines.get(address) for address in held.pods]
    if any(line is None or line.revision != held.wanted.revision for line in lines):
        return None
    found = (p.address for p in held.wanted.peers if _place(p) == seen.coordinator)
    return next((address for address in found if address in held.pods), None)


def _place(peer: Peer) -> SlotAttempt:
    return SlotAttempt(slot=peer.slot, attempt=peer.attempt)


def choose_word(words: list[tuple[Seen, float]]) -> tuple[Seen, float]:
    """The end, if anyone tells of it; else the highest epoch; of equals the youngest."""
    return max(words, key=lambda w: (w[0].done, w[0].failure is not None, w[0].epoch, w[1]))


def without_figures(seen: Seen) -> Seen:
    """What a pass must hear of at once; steps and losses are looked up when they are written."""
    return replace(
        seen,
        step=0,
        loss=None,
        members=tuple(replace(m, step=0) for m in seen.members),
        staged=None,
        committed=replace(seen.committed, age_ms=0) if seen.committed else None,
        good=None,
        seconds={},
        age_ms=0,
        incidents=tuple(replace(i, phases=()) for i in seen.incidents),
    )

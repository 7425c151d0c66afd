"""The operator's side of the two level documents: posts `Wanted`, keeps the newest `Seen`. Never
blocks a pass.

One task per job asks its agents every second. They get what the last pass decided, until a later
pass decides otherwise.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from everstep_contract import codec
from everstep_contract.levels import Seen, Wanted
from everstep_operator.jobs import reports
from everstep_operator.jobs.agent_connection import AgentConnection, Said, Unanswered
from everstep_operator.jobs.reports import Heard, JobReport

Key = tuple[str, str]
SLOW_SECONDS = 0.5
"""How long a round waits for an agent that does not answer (its node may have lost power). Then it
uses the other agents' answers, and the next round can send them a new document. The slow agent's
answer, or its failure, is taken in a later round.
"""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class JobSession:
    """The document for one job, and the job's newest report."""

    token: str
    wanted: Wanted
    pods: dict[str, str]
    """Address → pod UID."""
    connections: dict[str, AgentConnection] = field(default_factory=dict)
    newest: Heard | None = None
    proven: bool = False
    """An agent of the job has proved an answer to this process: from now on all answers need a
    proof.
    """
    task: asyncio.Task[None] | None = None
    asking: dict[str, asyncio.Task[Heard | None]] = field(default_factory=dict)
    """Requests under way, by address."""
    turn: int = 0
    stirred: asyncio.Event = field(default_factory=asyncio.Event)


class Agents:
    """All sessions. `heard` is called with a job's key when its report has changed in anything but
    figures, or when an address begins to give unproven answers.
    """

    def __init__(
        self,
        heard: Callable[[Key], None],
        interval: float = 1.0,
        may_speak: Callable[[], bool] = lambda: True,
    ) -> None:
        self._heard, self._interval = heard, interval
        self._may_speak = may_speak
        """False: another operator may be talking to the job by now."""
        self._sessions: dict[Key, JobSession] = {}
        self._revision = 0

    def tell(self, key: Key, token: str, wanted: Wanted, pods: dict[str, str]) -> None:
        """From now on send this document to the job's agents; `pods` maps addresses to pod UIDs."""
        held = self._sessions.get(key)
        if held is None or held.token != token:
            self.forget(key)
            held = JobSession(token=token, wanted=self._numbered(wanted), pods=pods)
            held.task = asyncio.create_task(self._run(key, held), name=f"agents {key[0]}/{key[1]}")
            self._sessions[key] = held
            return
        held.pods = pods
        if replace(held.wanted, revision=0) != replace(wanted, revision=0):
            held.wanted = self._numbered(wanted)
            held.stirred.set()

    def _numbered(self, wanted: Wanted) -> Wanted:
        """Give the document the next revision. Revisions start from the clock, so they also grow
        across restarts of the operator.
        """
        self._revision = max(self._revision + 1, time.time_ns() // 1_000_000)
        return replace(wanted, revision=self._revision)

    def report_on(self, key: Key) -> JobReport:
        held = self._sessions.get(key)
        if held is None:
            return JobReport()
        now = time.monotonic()
        known = {u: held.connections[a] for a, u in held.pods.items() if a in held.connections}
        return JobReport(
            seen=held.newest.seen if held.newest else None,
            age=now - held.newest.at if held.newest else 0.0,
            callers=frozenset(uid for uid, one in known.items() if one.answered),
            asked_for={uid: now - one.since for uid, one in known.items()},
            unproven=frozenset(uid for uid, one in known.items() if one.unproven),
        )

    def forget(self, key: Key) -> None:
        held = self._sessions.pop(key, None)
        if held is not None and held.task is not None:
            held.task.cancel()

    async def close(self) -> None:
        tasks = [d.task for d in self._sessions.values() if d.task]
        for key in list(self._sessions):
            self.forget(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: Key, held: JobSession) -> None:
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
            for address in list(held.connections):
                _drop(held, address)

    async def _round(self, key: Key, held: JobSession) -> None:
        for address in [a for a in held.connections if a not in held.pods]:
            _drop(held, address)
        addresses = reports.choose_addresses(list(held.pods), held.turn, _quiet_coordinator(held))
        held.turn += 1
        unproven = _list_unproven(held)
        body = codec.dumps(held.wanted)
        for address in (a for a in addresses if a not in held.asking):
            held.asking[address] = asyncio.create_task(self._ask(held, address, body))
        answers = await _take_answers(held.asking)
        before = held.newest
        self._keep(key, held, answers)
        if _is_news(before, held.newest) or not _list_unproven(held) <= unproven:
            self._heard(key)

    async def _ask(self, held: JobSession, address: str, body: bytes) -> Heard | None:
        connection = held.connections.get(address)
        if connection is None:
            connection = held.connections[address] = AgentConnection(address, held.token)
        revision = held.wanted.revision
        try:
            said = await connection.ask(body, reports.limit_answer(len(held.pods)))
        except Unanswered as error:
            if str(error) != connection.failure:
                log.info("agent %s does not answer: %s", address, error)
            connection.failure = str(error)
            return None
        connection.failure, connection.revision = "", revision
        return self._judge(held, connection, said)

    def _judge(self, held: JobSession, connection: AgentConnection, said: Said) -> Heard | None:
        """The part of an answer that counts; None: no part of it does (see `reports`)."""
        at = time.monotonic() - said.age
        if said.proven:
            connection.answered = held.proven = True
            return Heard(seen=reports.trim(said.seen), at=at)
        connection.answered = not held.proven
        if held.proven:
            return None
        return Heard(seen=reports.take_figures(said.seen, held.wanted), at=at, proven=False)

    def _keep(self, key: Key, held: JobSession, answers: list[Heard]) -> None:
        newest = reports.choose_newest(answers)
        if newest is None:
            return
        if reports.replaces(newest, held.newest):
            held.newest = newest
        else:
            log.info(
                "%s/%s: an answer of epoch %d, older than the known one", *key, newest.seen.epoch
            )


async def _take_answers(asking: dict[str, asyncio.Task[Heard | None]]) -> list[Heard]:
    """The answers that arrive within SLOW_SECONDS; the other requests continue."""
    if asking:
        await asyncio.wait(asking.values(), timeout=SLOW_SECONDS)
    answered = [address for address, task in asking.items() if task.done()]
    answers = [asking.pop(address).result() for address in answered]
    return [heard for heard in answers if heard is not None]


def _drop(held: JobSession, address: str) -> None:
    if request := held.asking.pop(address, None):
        request.cancel()
    held.connections.pop(address).close()


def _is_news(before: Heard | None, after: Heard | None) -> bool:
    """Whether a pass should run at once."""
    if after is None or after is before:
        return False
    return before is None or _level(before) != _level(after)


def _level(heard: Heard) -> Seen:
    return reports.without_figures(heard.seen)


def _list_unproven(held: JobSession) -> set[str]:
    return {address for address, one in held.connections.items() if one.unproven}


def _quiet_coordinator(held: JobSession) -> str | None:
    if not held.pods.keys() <= held.connections.keys():
        return None
    told = {address: held.connections[address].revision for address in held.pods}
    seen = held.newest.seen if held.newest else None
    return reports.find_quiet_coordinator(seen, held.wanted, told)

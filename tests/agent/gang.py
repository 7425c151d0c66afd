"""A job of real agents on loopback. The agents run in this process, the stub workers are forks of it, and the store is
a folder.
"""

import asyncio
import contextlib
import io
import os
import runpy
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from everstep_agent import logline, storage
from everstep_agent.agent import Agent
from everstep_agent.peers.client import PeerClient, PeerError
from everstep_agent.pod import spawn
from everstep_agent.pod.worker import Worker
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.tools import verify
from everstep_contract import env, levels, report

STUB = str(Path(__file__).with_name("stub_worker.py"))


class Gang:
    def __init__(
        self,
        tmp_path: Path,
        count: int = 2,
        *,
        uid: str = "uid-1",
        job: str = "ns/job",
        **settings: object,
    ) -> None:
        self.tmp = tmp_path
        self.count = count
        self.settings = {
            "save_every_steps": 0,
            "uri": f"file://{tmp_path}/store",
            "run": "ns/job",
            **settings,
        }
        self.uid, self.job = uid, job
        self.token = secrets.token_hex(8)
        """Different for each gang, because a later gang may get a port that an agent has left."""
        self.agents: dict[int, Agent] = {}
        self.attempts: dict[int, int] = {}
        self.tasks: dict[int, asyncio.Task[report.ExitReport]] = {}
        self.wanted = levels.Wanted(
            revision=1, min_workers=count, want_workers=count, max_workers=count
        )
        self.seen = levels.Seen()
        self.history: list[levels.Seen] = []
        self.stub = {"STUB_UNTIL": "20", "STUB_STEP_MS": "15"}
        self.log = io.StringIO() if os.environ.get("GANG_LOG") is None else sys.stderr
        self.script = STUB
        self.asks_after_end = True
        """False: behave like an operator that has seen the job's end and turned to others."""
        self._poster: asyncio.Task[None] | None = None
        (tmp_path / "store").mkdir(exist_ok=True)

    async def __aenter__(self) -> Self:
        if os.environ.get("GANG_DUMP"):
            asyncio.get_running_loop().call_later(float(os.environ["GANG_DUMP"]), dump_tasks)
        for slot in range(self.count):
            await self.start(slot, 0)
        self._poster = asyncio.create_task(self._post())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._poster is not None
        self._poster.cancel()
        for slot in list(self.tasks):
            await self.kill(slot, say=False)
        with contextlib.suppress(asyncio.CancelledError):
            await self._poster

    async def start(self, slot: int, attempt: int, **changes: object) -> Agent:
        memory = self.tmp / f"m-{self.uid}-{slot}-{attempt}"
        settings = env.AgentEnv(
            **{
                "job": self.job, "job_uid": self.uid, "slot": slot, "attempt": attempt,
                "token": self.token,
                "pod_ip": "127.0.0.1", "port": 0, "memory": str(memory),
                "termination_log": str(self.tmp / f"report-{self.uid}-{slot}-{attempt}"),
                "grace_seconds": 10.0, **self.settings, **changes,
            }
        )  # fmt: skip
        agent = Agent(
            settings,
            fork_script(self.script),
            environ={**os.environ, **self.stub},
            line=logline.Log(self.log),
        )
        self.agents[slot], self.attempts[slot] = agent, attempt
        self.tasks[slot] = asyncio.create_task(agent.run())
        bound = asyncio.create_task(agent.bound.wait())
        await asyncio.wait([bound, self.tasks[slot]], return_when=asyncio.FIRST_COMPLETED)
        bound.cancel()
        self.tell_peers()
        return agent

    async def kill(self, slot: int, *, say: bool = True) -> None:
        """End everything in the pod at once, without an exit report, as SIGKILL of the agent does."""
        task, agent = self.tasks.pop(slot), self.agents[slot]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if say:
            dead = levels.DeadAgent(
                slot=slot, attempt=self.attempts[slot], incarnation=agent.me.incarnation
            )
            self.want(dead=(*self.wanted.dead, dead))

    def want(self, **changes: object) -> None:
        self.wanted = replace(self.wanted, revision=self.wanted.revision + 1, **changes)

    def tell_peers(self) -> None:
        self.want(
            peers=tuple(
                levels.Peer(slot=s, attempt=self.attempts[s], address=a.me.address)
                for s, a in sorted(self.agents.items())
                if s in self.attempts and s in self.tasks and hasattr(a, "me")
            )
        )

    async def _post(self) -> None:
        clients: dict[str, PeerClient] = {}
        try:
            while self.asks_after_end or not (self.seen.done or self.seen.stopped):
                for slot, agent in list(self.agents.items()):
                    starts = not hasattr(agent, "me")
                    if starts or slot not in self.tasks or self.tasks[slot].done():
                        continue
                    client = clients.setdefault(
                        agent.me.address, PeerClient(agent.me.address, self.token)
                    )
                    with contextlib.suppress(PeerError):
                        seen = await client.call(
                            "/v1/wanted", self.wanted, levels.Seen, timeout=2.0
                        )
                        if seen.coordinator is not None:
                            self.seen = seen
                            self.history.append(seen)
                await asyncio.sleep(0.05)
        finally:
            for client in clients.values():
                await client.close()

    def worker(self, slot: int, local: int = 0) -> int:
        """The pid of the worker that trains in this slot now."""
        return self.agents[slot].pod.workers.current[local].pid

    async def until(
        self, what: Callable[[levels.Seen], object], seconds: float = 180.0
    ) -> levels.Seen:
        end = time.monotonic() + seconds
        while not what(self.seen):
            if time.monotonic() > end:
                await self._show_stacks()
                raise AssertionError(f"not in {seconds} s; last seen {self.seen}\n{self.shown()}")
            assert self._poster is not None
            assert not self._poster.cancelled()
            for task in (self._poster, *self.tasks.values()):
                if task.done() and not task.cancelled() and task.exception():
                    raise task.exception()  # type: ignore[misc]
            await asyncio.sleep(0.01)
        return self.seen

    async def _show_stacks(self) -> None:
        """Make the workers that run Everstep's runtime print on stderr where they wait."""
        for agent in self.agents.values():
            for worker in agent.pod.workers.current.values():
                if worker.alive and worker.tracked is not None:
                    os.kill(worker.pid, signal.SIGUSR1)
        await asyncio.sleep(0.5)

    async def reports(self, seconds: float = 180.0) -> dict[int, report.ExitReport]:
        """Wait for the end of every running agent; return the exit reports by slot."""
        tasks = dict(self.tasks)
        await asyncio.wait(tasks.values(), timeout=seconds)
        late = [slot for slot, task in tasks.items() if not task.done()]
        if late:
            raise AssertionError(f"slots {late} still run; last seen {self.seen}\n{self.shown()}")
        return {slot: task.result() for slot, task in tasks.items()}

    async def suspend(self) -> int:
        """Suspend the job, wait for its end, and return the step of its last commit.

        It is read from the run log: an agent may end before this process has read its last answer.
        """
        self.want(stop=levels.Stop.SUSPEND)
        ends = await self.reports()
        assert report.Cause.STOPPED in {r.cause for r in ends.values()}
        return (await self.run_log()).commits[-1].step

    def shown(self) -> str:
        return self.log.getvalue() if isinstance(self.log, io.StringIO) else ""

    def store(self) -> storage.ObjectStore:
        return storage.open_store(str(self.settings["uri"]), str(self.settings["run"]), {})

    async def run_log(self) -> RunLog:
        log = RunLog(self.store())
        await log.refresh()
        return log

    async def verified(self) -> verify.Verified:
        return await verify.verify_run(self.store(), entries=True)


def fork_script(script: str) -> spawn.Spawner:
    """Return a spawner that forks this process to run the script; most of its imports are already loaded."""

    def run() -> None:
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_module(Path(script).stem, run_name="__main__")

    return spawn.ForkSpawner(run)


async def assert_exact(gang: Gang, steps: int) -> None:
    found = await gang.verified()
    assert found.ok, f"{found.problems}\n{gang.shown()}"
    assert found.steps == steps
    assert [e.step for e in found.entries] == list(range(1, steps + 1))


def dump_tasks() -> None:
    """Print every task with all the frames in which it is suspended."""
    for task in asyncio.all_tasks():
        print(f"--- {task.get_name()} cancelling={task.cancelling()}", file=sys.stderr)
        waits: Any = task.get_coro()
        while waits is not None:
            frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
            where = f"{frame.f_code.co_qualname}:{frame.f_lineno}" if frame else repr(waits)[:200]
            print(f"    {where}", file=sys.stderr)
            waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)


async def die_between_two_steps(gang: Gang, slot: int) -> None:
    """Kill the worker while all others wait for it, so that none of them gets a step ahead."""
    dying = gang.agents[slot].pod.workers.current[0]
    others = [a.pod.workers.current[0] for s, a in gang.agents.items() if s != slot]
    async with asyncio.timeout(20):
        await stop_while_it_computes(dying)
        while not wait_for_more_than(dying.position().applied, others):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    os.kill(dying.pid, signal.SIGKILL)


async def stop_while_it_computes(worker: Worker) -> None:
    """Stop the worker while it computes; a waiting rank may already have contributed to the step."""
    while True:
        os.kill(worker.pid, signal.SIGSTOP)
        while not stopped(worker.pid):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if not worker.position().waiting:
            return
        os.kill(worker.pid, signal.SIGCONT)
        await asyncio.sleep(0.005)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wait_for_more_than(applied: int, others: list[Worker]) -> bool:
    at = [w.position() for w in others]
    return all(p.waiting and p.applied == at[0].applied >= applied for p in at)

"""`everstep run` without a cluster: acts as the operator for agents on this machine.

It starts one agent per worker on a loopback port, publishes `wanted`, polls the job's state twice a
second, replaces a lost agent by the slot's next attempt, and prints what the job reports.
"""

import asyncio
import contextlib
import os
import platform
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from everstep_agent import logline
from everstep_agent.local import agent_process, conclusion, memory_folder, terminal
from everstep_agent.local.agent_process import AgentProcess, LocalJob
from everstep_agent.local.drill import Drill
from everstep_agent.local.plan import Plan, describe_size
from everstep_agent.local.progress import Interruptions
from everstep_agent.local.whom_to_ask import choose_agents
from everstep_agent.peers.client import PeerClient, PeerError
from everstep_agent.storage import folder as folders
from everstep_agent.storage.errors import BadAddress
from everstep_contract import levels, names, report

PERIOD_SECONDS = 0.5
"""Seconds between two checks of running agents; the end of an agent is handled at once."""
DRILL_PERIOD_SECONDS = 0.05
"""The same in a drill, where it limits how exact the measured times are."""
CALL_SECONDS = 3.0
"""Limit for an agent to answer; it is asked again in the next period."""
LATE_SECONDS = 1.0
"""A call that ends this long after its limit proves nothing about the agent: this process itself
was stopped (Ctrl-Z, a paused machine).
"""
MISSED_ANSWERS = 2
"""An agent that has answered before, then misses this many answers in a row, and had the full time
for them, is stuck. It is killed, which proves that its ranks are dead, and replaced. An agent that
ends refuses connections at first: each call fails at once, and its process needs a moment to end.
"""
STOP_SECONDS = 60.0
"""Limit for saving after Ctrl-C, or after an agent has ended for good by itself. Then the agents are
killed, as on a second Ctrl-C.
"""
NO_STEP_SECONDS = 15.0
"""The same while no step was taken, so that there is nothing to save: the store may not answer, for example."""
TWICE_SECONDS = 0.2
"""A signal that follows the first one sooner than this is the same request: `timeout`, a shell or `make` sends
one to the process and one to its process group. Nobody presses Ctrl-C twice that fast.
"""
END_SECONDS = 20.0
"""Limit for the other agents to end once the job has ended. Then they are killed."""
LOST_AGENTS = 10
"""How many agents may be lost while the run makes no new step. One more loss ends the run."""
INTERRUPTIONS = 20
"""How often the job may be interrupted while it makes no new step (`restartBudgets.worker` on a
cluster).
"""
DEAD_KEPT = 8
"""Of how many attempts of a slot the deaths are published; an older one is known to be gone by the newer one."""
THIS_MACHINE = platform.node() or "localhost"
"""The node of all agents. They share it, so a copy in another agent's memory would be lost with the
original.
"""


def launch(plan: Plan) -> int:
    try:
        launcher = Launcher(plan)
    except OSError as error:
        print(f"everstep: cannot create a folder in memory for the run: {error}", file=sys.stderr)
        return 2
    return asyncio.run(launcher.run())


class Launcher:
    """`say` prints a line."""

    def __init__(self, plan: Plan, say: Callable[[str], None] | None = None) -> None:
        self._plan = plan
        self._began = time.monotonic()
        self._say_line = say or (lambda line: print(line, flush=True))
        self._slots: dict[int, AgentProcess] = {}
        self._dead: list[levels.DeadAgent] = []
        self._revision = 0
        self._stop = levels.Stop.NONE
        self._interrupts = 0
        self._interrupted_at = 0.0
        self._stop_at = 0.0
        self._lost = self._interrupted = Interruptions()
        self._restarts = 0
        self._said_start = self._said_late = False
        self._drill = Drill(workers=plan.workers) if plan.drill else None
        self._pids: dict[int, int] = {}
        """Rank → pid, as the agents have reported."""
        self._clients: dict[str, PeerClient] = {}
        self._missed: dict[str, list[float]] = {}
        """Address of an agent that has answered → when the calls began that it has not answered since."""
        self._told: dict[str, int] = {}
        """Address → the revision of `wanted` that its agent has confirmed."""
        self._ends: dict[tuple[int, int], asyncio.Future[int]] = {}
        """(slot, attempt) of each agent that is alive → its end. One for each, because asyncio keeps
        all that ever waited for a process until the process ends.
        """
        self._round_at = self._began
        """When all agents were last asked."""
        memory_folder.sweep()
        self._memory = memory_folder.create()
        self._job = LocalJob(
            plan=plan,
            uid=secrets.token_hex(8),
            token=secrets.token_hex(16),
            folder=self._memory.path,
            show=self._show,
        )
        self._given_up: report.ExitReport | None = None
        self.seen = levels.Seen()
        self.reports: dict[int, report.ExitReport] = {}

    async def run(self) -> int:
        try:
            self._prepare_store()
            self._catch_signals()
            size = describe_size(self._plan.workers, self._plan.mesh)
            self._say(f"{self._plan.run}: {size}, checkpoints in {self._plan.place}")
            if memory_folder.is_trained(self._plan.place):
                self._say(terminal.TAKES_OVER)
            memory_folder.note_run(self._memory, self._plan.place)
            for number in range(self._plan.workers + self._plan.spares):
                await self._start(number, 0)
            return await self._operate()
        except BadAddress as error:
            self._complain(str(error))
            return 2
        except OSError as error:
            self._complain(f"{error.strerror}: {error.filename}" if error.filename else str(error))
            return 2
        finally:
            await self._clean_up()

    def _prepare_store(self) -> None:
        """Create a local store's folder. Raises OSError, which names it, or `BadAddress`."""
        if folder := self._plan.store_folder:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                obstacle = folders.describe_obstacle(Path(folder))
                why = obstacle or f"cannot create the folder: {error.strerror}"
                raise OSError(f"--store {folder}: {why}") from None

    # --- the operator's part ---------------------------------------------------------------------

    async def _operate(self) -> int:
        ended_at = None
        while True:
            await asyncio.gather(*(self._look_after(s) for s in list(self._slots.values())))
            if not any(s.alive for s in self._slots.values()):
                return self._conclude()
            now = time.monotonic()
            ended_at = (ended_at or now) if self.reports else None
            self._let_others_save()
            if self._is_late(now, ended_at):
                self._end_without_save()
            await self._exchange()
            self._kill_silent()
            if not self._said_start and terminal.is_start_slow(now - self._began, self.seen):
                self._said_start = True
                self._say("the workers start: importing torch and the script can take a while")
            await self._wait(DRILL_PERIOD_SECONDS if self._drill else PERIOD_SECONDS)

    def _is_late(self, now: float, ended_at: float | None) -> bool:
        """`ended_at`: when the first agent ended for good; None: none has."""
        ends = ended_at is not None and not self._stop_at and now - ended_at > END_SECONDS
        stops = bool(self._stop_at) and now - self._stop_at > self._limit_stop()
        return ends or stops or self._interrupts > 1

    def _limit_stop(self) -> float:
        return STOP_SECONDS if terminal.has_steps(self.seen) else NO_STEP_SECONDS

    def _let_others_save(self) -> None:
        """End the run after a save if an agent has ended by itself: its script does not start, for
        example because it was edited. The others do not know of that, and train.
        """
        seen = self.seen
        told = seen.done or seen.failure is not None or seen.stopped is not None or seen.fenced
        alone = any(r.cause in report.FOUND_ALONE and not r.epoch for r in self.reports.values())
        if alone and not told and self._stop is levels.Stop.NONE:
            self._say("an agent cannot start the script any more: the others save and stop")
            self._stop_run(levels.Stop.FINISH)

    def _end_without_save(self) -> None:
        if self._stop_at and self._interrupts < 2 and not self._said_late:
            self._said_late = True
            lost = terminal.describe_lost(self.seen)
            self._say(f"not saved within {self._limit_stop():.0f} s: stopping without it; {lost}")
        self._kill_all()

    async def _wait(self, seconds: float) -> None:
        """Wait at most `seconds`, or until an agent ends."""
        alive = {(s.slot, s.attempt): s.process for s in self._slots.values() if s.alive}
        self._ends = {
            place: self._ends.get(place) or asyncio.ensure_future(process.wait())
            for place, process in alive.items()
        }
        if self._ends:
            await asyncio.wait(
                self._ends.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )

    async def _look_after(self, agent: AgentProcess) -> None:
        if agent.alive or agent.slot in self.reports:
            return
        await agent.ended()
        found = agent.read_report()
        if found is not None and found.cause in report.FOR_GOOD - _REPLACED:
            self.reports[agent.slot] = found
            return
        await self._replace(agent, found)

    async def _replace(self, agent: AgentProcess, found: report.ExitReport | None) -> None:
        how = found.message if found else agent.describe_end()
        left = found is not None and found.cause is report.Cause.LEFT
        if self._interrupts < 2:  # else it was killed on request
            self._say(f"agent of slot {agent.slot}{'' if left else ' lost'}: {how}")
        self._lost = self._lost.add(time.monotonic())
        self._note_death(agent, found)
        await self._forget(agent.address)
        if self._stop is not levels.Stop.NONE or self.reports:
            self.reports[agent.slot] = found or _lost_report(how)
        elif self._lost.count > LOST_AGENTS:
            text = f"{self._lost.count} agents were lost without a new step; the last one: {how}"
            self._give_up(agent.slot, text)
        else:
            await self._start_next(agent)

    async def _start_next(self, agent: AgentProcess) -> None:
        """Start the slot's next attempt. If this machine allows no more processes or files, the
        others save and stop.
        """
        try:
            await self._start(agent.slot, agent.attempt + 1)
        except OSError as error:
            text = f"the agent of slot {agent.slot} cannot be replaced: {error}"
            self._say(f"{text}; the others save and stop")
            self._given_up = self._given_up or _lost_report(text)
            self.reports[agent.slot] = self._given_up
            self._stop_run(levels.Stop.FINISH)
        else:
            agent.remove_memory()

    def _note_death(self, agent: AgentProcess, found: report.ExitReport | None) -> None:
        """Record that none of the agent's processes is alive, unless its report says that one
        survives SIGKILL. In that case the others can continue only once the slot's next attempt has
        started.
        """
        if found is None or found.cause is not report.Cause.PROCESS_STUCK:
            dead = levels.DeadAgent(slot=agent.slot, attempt=agent.attempt, incarnation=1)
            kept = (
                d
                for d in self._dead
                if d.slot != agent.slot or d.attempt > agent.attempt - DEAD_KEPT
            )
            self._dead = [*kept, dead]
        self._revision += 1

    async def _forget(self, address: str) -> None:
        """A later agent may get the same port."""
        self._missed.pop(address, None)
        client = self._clients.pop(address, None)
        if client is not None:
            await client.close()

    def _give_up(self, slot: int, text: str) -> None:
        self._given_up = self._given_up or _lost_report(text)
        self.reports[slot] = self._given_up
        self._kill_all()

    def _wanted(self) -> levels.Wanted:
        count = self._plan.workers
        peers = tuple(
            levels.Peer(slot=s.slot, attempt=s.attempt, address=s.address, node=THIS_MACHINE)
            for s in self._slots.values()
            if s.alive
        )
        return levels.Wanted(
            generation=1,
            revision=self._revision,
            min_workers=count,
            want_workers=count,
            max_workers=count,
            peers=peers,
            dead=tuple(self._dead),
            stop=self._stop,
        )

    async def _exchange(self) -> None:
        alive, now = [s for s in self._slots.values() if s.alive], time.monotonic()
        agents = choose_agents(
            alive, self._told, self.seen, revision=self._revision, since_round=now - self._round_at
        )
        if agents == alive:
            self._round_at = now
        wanted = self._wanted()
        answers = await asyncio.gather(*(self._post(s.address, wanted) for s in agents))
        known = [a for a in answers if a is not None and a.coordinator is not None]
        if known:
            self._see(min(known, key=lambda a: (-a.epoch, a.age_ms)))

    def _see(self, newest: levels.Seen) -> None:
        for line in terminal.describe_changes(self.seen, newest):
            self._say(line)
        self.seen = newest
        for stuck in newest.stuck:
            agent = self._slots[stuck.slot]
            if agent.attempt == stuck.attempt:
                agent.kill()  # its report is written; the slot continues in another attempt
        self._lost = self._lost.reach(newest.step)
        self._count_interruptions(newest)
        if self._drill is not None:
            self._follow_drill(self._drill)

    def _follow_drill(self, drill: Drill) -> None:
        pid = drill.choose(self.seen, self._pids)
        if pid is not None:
            self._say(f"drill: SIGKILL to rank {drill.rank} (pid {pid})")
            drill.killed_at = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif drill.follow(self.seen, time.monotonic()) and self._stop is levels.Stop.NONE:
            for line in drill.describe(self.seen):
                self._say(line)
            prove = shlex.join(["everstep", "verify", self._plan.place])
            self._say(f"drill: saving and stopping; then prove the run: {prove}")
            self._stop_run()

    def _count_interruptions(self, newest: levels.Seen) -> None:
        lost = {c: n for c, n in newest.restarts.items() if c not in levels.IN_ORDER}
        total = max(self._restarts, sum(lost.values()))
        more, self._restarts = total - self._restarts, total
        self._interrupted = self._interrupted.reach(newest.step).add(time.monotonic(), more)
        if self._interrupted.count > INTERRUPTIONS and not self.reports:
            causes = ", ".join(f"{c} {n}" for c, n in sorted(lost.items()))
            text = f"{self._interrupted.count} interruptions without a new step ({causes} in all)"
            self._give_up(min(self._slots), text)

    async def _post(self, address: str, wanted: levels.Wanted) -> levels.Seen | None:
        client = self._clients.setdefault(address, PeerClient(address, self._job.token))
        self._told.pop(address, None)
        began = time.monotonic()
        try:
            seen = await client.call(names.WANTED_PATH, wanted, levels.Seen, timeout=CALL_SECONDS)
        except PeerError as error:
            self._note_missed(address, began, answered=error.refused)
            return None
        self._told[address] = wanted.revision
        self._missed[address] = []
        return seen

    def _note_missed(self, address: str, began: float, *, answered: bool) -> None:
        """`answered`: the agent lives, but its answer is of no use."""
        late = time.monotonic() - began > CALL_SECONDS + LATE_SECONDS
        if answered:
            self._missed[address] = []
        elif address in self._missed and not late:
            self._missed[address].append(began)

    def _kill_silent(self) -> None:
        for agent in self._slots.values():
            missed = self._missed.get(agent.address, [])
            if not agent.alive or len(missed) < MISSED_ANSWERS:
                continue
            if time.monotonic() - missed[0] >= MISSED_ANSWERS * CALL_SECONDS:
                del self._missed[agent.address]
                self._say(f"agent of slot {agent.slot} does not answer any more: it is killed")
                agent.kill()

    # --- agents ----------------------------------------------------------------------------------

    async def _start(self, slot: int, attempt: int) -> None:
        self._slots[slot] = await agent_process.start(self._job, slot, attempt)
        self._revision += 1

    def _show(self, lines: list[str], error: bool) -> None:
        """Show an agent's output. Lines that are not Everstep's are passed on unchanged, in one
        piece.
        """
        plain: list[str] = []
        for line in lines:
            known = logline.parse_line(line) if error else None
            text = terminal.describe_event(*known) if known else None
            if known is not None and known[0] == "worker_runs":
                self._pids[int(known[1]["rank"])] = int(known[1]["pid"])
            if text is not None:
                self._say(text)
            elif known is None or self._plan.verbose:
                plain.append(line)
        if plain:
            stream = sys.stderr if error else sys.stdout
            stream.write("".join(f"{line}\n" for line in plain))
            stream.flush()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    def _hang_up(self) -> None:
        """The terminal was closed: save and stop. Its shell may send the signal again, which is no second Ctrl-C."""
        if not self._interrupts:
            self._interrupt()

    def _interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupts and now - self._interrupted_at < TWICE_SECONDS:
            return
        self._interrupts, self._interrupted_at = self._interrupts + 1, now
        if self._interrupts == 1:
            self._say("stopping: saving first; press Ctrl-C again to stop at once")
            self._stop_run()
        elif self._interrupts == 2:
            self._say("stopping at once, without a save")

    def _stop_run(self, stop: levels.Stop = levels.Stop.SUSPEND) -> None:
        self._stop, self._stop_at = stop, time.monotonic()
        self._revision += 1

    def _kill_all(self) -> None:
        for agent in self._slots.values():
            agent.kill()

    async def _clean_up(self) -> None:
        self._kill_all()
        for left in await asyncio.gather(*(a.ended() for a in self._slots.values())):
            if left:
                self._complain(left)
        for client in self._clients.values():
            await client.close()
        self._memory.remove()

    # --- the end ---------------------------------------------------------------------------------

    def _conclude(self) -> int:
        found = conclusion.conclude(
            list(self.reports.values()),
            given_up=self._given_up,
            run=self._plan.run,
            committed=self.seen.committed.step if self.seen.committed else 0,
            interrupted=self._interrupts > 0,
        )
        if found.complaint:
            self._complain(found.complaint)
        if found.said:
            self._say(found.said)
        if self._drill is not None and self._drill.rank is None:
            self._say(
                "drill: the run ended before there was time for one; no rank was killed; start it with another --run"
            )
        return found.status

    def _say(self, text: str) -> None:
        self._say_line(f"everstep {time.monotonic() - self._began:7.1f} s  {text}")

    def _complain(self, text: str) -> None:
        print(f"everstep: {text}", file=sys.stderr, flush=True)


_REPLACED = frozenset({report.Cause.LEFT, report.Cause.PROCESS_STUCK})
"""Ends that are final for a pod but not for its slot, which continues in another attempt, as on a
cluster.
"""


def _lost_report(message: str) -> report.ExitReport:
    return report.ExitReport(cause=report.Cause.AGENT, message=message)

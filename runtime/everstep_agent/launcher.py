"""`everstep run` without a cluster: plays the operator for agents on this machine.

It starts one agent per worker on a loopback port, says twice a second what is wanted, starts a lost
agent again as the slot's next attempt, and shows what the job says of itself.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep_agent import conclusion, logline, spawn, terminal
from everstep_agent.peers import PeerClient, PeerError
from everstep_contract import env, levels, report

PERIOD_SECONDS = 0.5
CALL_SECONDS = 3.0
STOP_SECONDS = 60.0
END_SECONDS = 20.0
"""How long the other agents may take to end once the first has ended for good."""
LOST_AGENTS = 10
"""An agent that is lost more often than this is not lost by accident."""
HOST = "127.0.0.1"
PREFIX = "everstep-run-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    script: str
    args: tuple[str, ...]
    workers: int
    uri: str
    run: str
    save_every: int
    keep: int
    hang_seconds: float = 300.0
    guard_action: str = "Note"
    guard_factor: float = 10.0
    verbose: bool = False


def build_plan(
    *,
    script: str,
    args: Sequence[str],
    workers: int,
    store: str,
    run: str | None,
    save_every: int,
    keep: int,
    hang_seconds: float,
    guard_action: str,
    guard_factor: float,
    verbose: bool,
    folder: str,
) -> Plan:
    uri = store if "://" in store else "file://" + os.path.abspath(os.path.join(folder, store))
    return Plan(
        script=os.path.abspath(os.path.join(folder, script)),
        args=tuple(args),
        workers=workers,
        uri=uri,
        run=run or Path(script).stem,
        save_every=save_every,
        keep=keep,
        hang_seconds=hang_seconds,
        guard_action=guard_action,
        guard_factor=guard_factor,
        verbose=verbose,
    )


def launch(plan: Plan) -> int:
    return asyncio.run(Launcher(plan).run())


@dataclass(slots=True)
class Slot:
    number: int
    attempt: int
    address: str
    process: asyncio.subprocess.Process
    log: Path
    copies: list["asyncio.Task[None]"]

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


class Launcher:
    """`seen` is called with each new level of the job; `say` prints a line."""

    def __init__(self, plan: Plan, say: Callable[[str], None] | None = None) -> None:
        self._plan = plan
        self._token = secrets.token_hex(16)
        self._uid = secrets.token_hex(8)
        self._began = time.monotonic()
        self._say_line = say or (lambda line: print(line, flush=True))
        self._slots: dict[int, Slot] = {}
        self._dead: list[levels.DeadAgent] = []
        self._revision = 0
        self._stop = levels.Stop.NONE
        self._interrupts = 0
        self._stop_at = 0.0
        self._lost = 0
        self._said_start = False
        self._clients: dict[str, PeerClient] = {}
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=_memory()))
        self.seen = levels.Seen()
        self.reports: dict[int, report.ExitReport] = {}

    async def run(self) -> int:
        try:
            self._prepare_store()
            self._catch_signals()
            workers = "1 worker" if self._plan.workers == 1 else f"{self._plan.workers} workers"
            self._say(
                f"{self._plan.run}: {workers}, checkpoints in"
                f" {self._plan.uri.removeprefix('file://')}/{self._plan.run}"
            )
            for number in range(self._plan.workers):
                self._slots[number] = await self._start(number, 0)
            return await self._operate()
        except OSError as error:
            self._complain(f"{error.strerror}: {error.filename}" if error.filename else str(error))
            return 2
        finally:
            await self._clean_up()

    def _prepare_store(self) -> None:
        """Raises OSError, which names the folder."""
        if self._plan.uri.startswith("file://"):
            os.makedirs(self._plan.uri.removeprefix("file://"), exist_ok=True)

    # --- the operator's part ---------------------------------------------------------------------

    async def _operate(self) -> int:
        ended_at = None
        while True:
            await asyncio.gather(*(self._look_after(s) for s in list(self._slots.values())))
            if not any(s.alive for s in self._slots.values()):
                return self._conclude()
            now = time.monotonic()
            if self.reports:
                ended_at = ended_at or now
                if now - ended_at > END_SECONDS:
                    self._kill_all()
            if self._interrupts > 1 or (self._stop_at and now - self._stop_at > STOP_SECONDS):
                self._kill_all()
            await self._exchange()
            if not self._said_start and terminal.is_start_slow(now - self._began, self.seen):
                self._said_start = True
                self._say("the workers start: importing torch and the script can take a while")
            await self._wait(PERIOD_SECONDS)

    async def _wait(self, seconds: float) -> None:
        """A little while, or until an agent ends."""
        waits = [asyncio.ensure_future(s.process.wait()) for s in self._slots.values() if s.alive]
        if waits:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _look_after(self, slot: Slot) -> None:
        if slot.alive or slot.number in self.reports:
            return
        await asyncio.wait(slot.copies, timeout=1.0)
        found = _read_report(slot.log)
        left = found is not None and found.cause is report.Cause.LEFT  # as a pod that is drained
        if found is not None and found.cause in report.FOR_GOOD and not left:
            self.reports[slot.number] = found
            return
        how = found.message if found else spawn_words(slot.process.returncode)
        self._say(f"agent of slot {slot.number}{'' if left else ' lost'}: {how}")
        self._lost += 1
        self._dead.append(levels.DeadAgent(slot=slot.number, attempt=slot.attempt, incarnation=1))
        self._revision += 1
        if self._stop is not levels.Stop.NONE or self.reports:
            self.reports[slot.number] = found or _lost_report(how)
        elif self._lost > LOST_AGENTS:
            text = f"{self._lost} agents were lost; the last one {how}"
            self.reports[slot.number] = _lost_report(text)
            self._kill_all()
        else:
            self._slots[slot.number] = await self._start(slot.number, slot.attempt + 1)

    def _wanted(self) -> levels.Wanted:
        count = self._plan.workers
        peers = tuple(
            levels.Peer(slot=s.number, attempt=s.attempt, address=s.address)
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
        """Every agent is told, so that none depends on another to know its peers."""
        slots = [s for s in self._slots.values() if s.alive]
        wanted = self._wanted()
        answers = await asyncio.gather(*(self._post(s.address, wanted) for s in slots))
        known = [a for a in answers if a is not None and a.coordinator is not None]
        if known:
            newest = min(known, key=lambda a: (-a.epoch, a.age_ms))
            for line in terminal.describe_changes(self.seen, newest):
                self._say(line)
            self.seen = newest

    async def _post(self, address: str, wanted: levels.Wanted) -> levels.Seen | None:
        client = self._clients.setdefault(address, PeerClient(address, self._token))
        with contextlib.suppress(PeerError):
            return await client.call("/v1/wanted", wanted, levels.Seen, timeout=CALL_SECONDS)
        return None

    # --- agents ----------------------------------------------------------------------------------

    async def _start(self, number: int, attempt: int) -> Slot:
        plan = self._plan
        port = _free_port()
        memory = self._folder / f"slot-{number}-{attempt}"
        memory.mkdir()
        log = memory / "termination-log"
        settings = env.AgentEnv(
            job=f"local/{plan.run}",
            job_uid=self._uid,
            slot=number,
            attempt=attempt,
            token=self._token,
            pod_ip=HOST,
            port=port,
            uri=plan.uri,
            run=plan.run,
            save_every_steps=plan.save_every,
            keep=plan.keep,
            hang_seconds=plan.hang_seconds,
            guard_action=plan.guard_action,
            guard_factor=plan.guard_factor,
            memory=str(memory),
            termination_log=str(log),
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "everstep_agent.cli",
            "run",
            plan.script,
            "--",
            *plan.args,
            env=build_environ(dict(os.environ), settings, plan.workers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=spawn.die_with(os.getpid()),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        copies = [
            asyncio.create_task(self._copy(process.stdout, error=False)),
            asyncio.create_task(self._copy(process.stderr, error=True)),
        ]
        self._revision += 1
        return Slot(
            number=number,
            attempt=attempt,
            address=f"{HOST}:{port}",
            process=process,
            log=log,
            copies=copies,
        )

    async def _copy(self, reader: asyncio.StreamReader, *, error: bool) -> None:
        rest = b""
        while chunk := await reader.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._show(line.decode(errors="replace"), error)

    def _show(self, line: str, error: bool) -> None:
        known = logline.parse_line(line) if error else None
        if known is None:
            print(line, file=sys.stderr if error else sys.stdout, flush=True)
            return
        text = terminal.describe_event(*known)
        if text is not None:
            self._say(text)
        elif self._plan.verbose:
            print(line, file=sys.stderr, flush=True)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._say("stopping: saving first; once more to stop at once")
            self._stop, self._stop_at = levels.Stop.SUSPEND, time.monotonic()
            self._revision += 1

    def _kill_all(self) -> None:
        for slot in self._slots.values():
            if slot.alive:
                slot.process.kill()

    async def _clean_up(self) -> None:
        self._kill_all()
        for slot in self._slots.values():
            await slot.process.wait()
            await asyncio.wait(slot.copies, timeout=1.0)
        for client in self._clients.values():
            await client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- the end ---------------------------------------------------------------------------------

    def _conclude(self) -> int:
        found = conclusion.conclude(
            list(self.reports.values()),
            run=self._plan.run,
            committed=self.seen.committed.step if self.seen.committed else 0,
            interrupted=self._interrupts > 0,
        )
        if found.complaint:
            self._complain(found.complaint)
        if found.said:
            self._say(found.said)
        return found.status

    def _say(self, text: str) -> None:
        self._say_line(f"everstep {time.monotonic() - self._began:7.1f} s  {text}")

    def _complain(self, text: str) -> None:
        print(f"everstep: {text}", file=sys.stderr, flush=True)


def build_environ(environ: dict[str, str], settings: env.AgentEnv, workers: int) -> dict[str, str]:
    """On one machine the ranks meet on loopback and share the cores, as torchrun's do."""
    cores = max(1, (os.cpu_count() or 1) // max(1, workers))
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("OMP_NUM_THREADS", str(cores))
    return {**environ, **settings.to_env()}


def spawn_words(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"exited with status {returncode}"


def _lost_report(message: str) -> report.ExitReport:
    return report.ExitReport(cause=report.Cause.AGENT, message=message)


def _read_report(path: Path) -> report.ExitReport | None:
    try:
        return report.decode(path.read_bytes())
    except OSError:
        return None


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _sweep() -> None:
    """Memory of launchers that were killed and could not clean up."""
    for folder in Path(_memory() or tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port

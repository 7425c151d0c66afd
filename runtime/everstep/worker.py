"""The life of a worker: hello, start, form the group, run the user's `main`, finish, leave."""

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import NoReturn

import torch

from everstep import given, group, lightness, link, randomness
from everstep.errors import EverstepError, Misuse, NotUnderAgent, StateError
from everstep.job import Job
from everstep.meter import Meter
from everstep.session import Session, choose_device
from everstep_contract import PROTOCOL, env, wire
from everstep_contract.position import PositionPage
from everstep_contract.report import Cause

PR_SET_PDEATHSIG = 1
EXPLAIN_SECONDS = 2.0
"""How long an exception from a collective waits for the agent's word that a member was lost."""
TRACEBACK_CHARACTERS = 8000


class Life:
    """What the link's thread and the main thread share before there is a session."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.start: wire.Start | None = None
        self.link: link.Link | None = None

    def on_cut(self) -> None:
        """In the link's thread.

        During start-up the main thread may be deep in user code: answer for it.
        """
        if self.session is not None:
            self.session.group.cut()
        if (self.session is None or not self.session.settled) and self.start and self.link:
            self.link.send(
                wire.Parked(
                    epoch=self.start.epoch,
                    step=self.start.applied,
                    sound=False,
                    why="the epoch ended during start-up",
                )
            )


def run(main: Callable[[Job], None], *, seed: int = 0) -> None:
    """Run `main` as one worker of the job; returns only by ending the process.

    All random numbers are seeded from `seed`, the same on every rank, before `main` is called.

    Raises:
        NotUnderAgent: the process was not started by `everstep run`.
        Misuse: `main` is no function, or `seed` no whole number.
    """
    if not callable(main):
        raise Misuse(
            f"everstep.run({main!r}): give it the function: everstep.run(main), not main()"
        )
    given.whole("everstep.run: seed", seed)
    path = os.environ.get(env.AGENT_SOCKET)
    if not path:
        raise NotUnderAgent(
            f"{env.AGENT_SOCKET} is not set: no Everstep agent started this process. "
            f"Start it with: everstep run {os.path.basename(sys.argv[0]) or 'train.py'}"
        )
    _prepare()
    session = _join(path, seed)
    job = Job(session)
    try:
        main(job)
    except BaseException as error:
        _explain(session, error)
    _finish(session, job)


def _prepare() -> None:
    """Die with the agent; show all stacks on SIGUSR1; print lines as they come."""
    lightness.defer_compiler()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(line_buffering=True)


def _join(path: str, seed: int) -> Session:
    life = Life()
    life.link = link.connect(path, life.on_cut)
    life.link.send(wire.Hello(pid=os.getpid(), protocol=PROTOCOL))
    life.start = start = life.link.wait_start()
    export_ranks(start, os.environ)
    meter = Meter(open_page(os.environ), epoch=start.epoch, applied=start.applied)
    if torch.cuda.is_available():
        torch.cuda.set_device(choose_device(start.local_rank))
    session = _build(life.link, start, meter, seed)
    life.session = session
    if life.link.cut.is_set():
        session.group.cut()
    return session


def _build(line: link.Link, start: wire.Start, meter: Meter, seed: int) -> Session:
    try:
        with meter.charging("wait", waiting=True):
            formed = group.form(
                line,
                epoch=start.epoch,
                rank=start.rank,
                world=start.world,
                address=os.environ.get("EVERSTEP_POD_IP"),
            )
    except (RuntimeError, TimeoutError) as error:
        why = f"the group could not be formed: {error}"
        line.send(wire.Parked(epoch=start.epoch, step=start.applied, sound=False, why=why[:500]))
        while True:
            line.wait_save()
    randomness.seed_all("job", seed)
    try:
        return Session(link=line, group=formed, meter=meter, start=start, seed=seed)
    except StateError as error:
        _fail_early(line, start, error)


def export_ranks(start: wire.Start, environ: MutableMapping[str, str]) -> None:
    """As torch users expect them."""
    environ["RANK"], environ["WORLD_SIZE"] = str(start.rank), str(start.world)
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = (
        str(start.local_rank),
        str(start.local_world),
    )
    environ["GROUP_RANK"] = str(start.node_rank)


def open_page(environ: Mapping[str, str]) -> PositionPage | None:
    path = environ.get(env.POSITION_FILE)
    return PositionPage(path) if path else None


def _finish(session: Session, job: Job) -> NoReturn:
    """`main` has returned."""
    if session.until is None:
        session.fail(
            Cause.SCRIPT_ERROR, "main returned without training: job.steps was never called"
        )
    if not job.finished():
        session.fail(
            Cause.MISUSE,
            f"main returned after step {session.applied}, before until={session.until} (break out "
            "of job.steps?); "
            "a job ends when `until` is reached",
        )
    session.link.send(wire.Finished(epoch=session.start.epoch, step=session.applied))
    line = session.link
    assert isinstance(line, link.Link)
    with session.meter.charging("idle", waiting=True):
        released = line.wait_release()
    if not released:
        session.park(session.applied, sound=job.sound(), why="the epoch ended")
    atexit._run_exitfuncs()
    line.leave(0)


def _explain(session: Session, error: BaseException) -> NoReturn:
    """A membership change explains an error of a collective; anything else is the script's own."""
    text = "".join(traceback.format_exception(error))
    if session.broken or (_of_a_collective(text) and session.link.cut.wait(EXPLAIN_SECONDS)):
        session.park(
            session.applied, sound=False, why=f"an error after the epoch ended: {error!r:.200}"
        )
    print(text.rstrip(), file=sys.stderr, flush=True)
    ours = isinstance(error, EverstepError)
    session.fail(
        classify_error(session, error),
        str(error) if ours else f"{type(error).__name__}: {error}",
        text[-TRACEBACK_CHARACTERS:],
    )


def classify_error(session: Session, error: BaseException) -> Cause:
    if isinstance(error, (Misuse, StateError)):
        return Cause.MISUSE
    return Cause.USER_ERROR if session.applied else Cause.SCRIPT_ERROR


def _of_a_collective(text: str) -> bool:
    return any(word in text for word in ("gloo", "NCCL", "torch/distributed", "StoreClosed"))


def _fail_early(line: link.Link, start: wire.Start, error: Exception) -> NoReturn:
    line.send(
        wire.Failed(
            epoch=start.epoch,
            step=start.applied,
            cause=Cause.MISUSE.value,
            message=str(error),
        )
    )
    line.leave(1)

"""The life of a worker: hello, start, form the group, run the script's `main`, finish, leave."""

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, NoReturn

from everstep import (
    agent_socket,
    data_worker,
    defer_dynamo,
    device,
    forming,
    group,
    heap,
    meeting,
    randomness,
    registrations,
    script_errors,
    undo_step,
    validate,
)
from everstep.errors import Misuse, NotUnderAgent, StateError
from everstep.job import Job
from everstep.membership import Membership
from everstep.meter import Meter
from everstep.session import Session
from everstep.unit import Unit
from everstep_contract import PROTOCOL, env, units, wire
from everstep_contract.position import PositionPage
from everstep_contract.report import Cause

PR_SET_PDEATHSIG = 1
EXPLAIN_SECONDS = 2.0
"""How long a worker waits, after an exception from a collective, for the agent's message that a member was lost."""
TRACEBACK_CHARACTERS = 8000
"""How much of the end of a traceback is sent to the agent."""


class StartUp:
    """What the socket's thread and the main thread share until there is a session."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.start: wire.Start | None = None
        self.agent: agent_socket.AgentSocket | None = None

    def on_epoch(self, frame: Any) -> None:
        """Called in the socket's thread, which answers the agent because the main thread
        may be in the script's code.
        """
        membership = self.session.membership if self.session is not None else None
        match frame:
            case wire.Cut(keep=True):
                self._hold(frame, membership)
            case wire.Cut():
                if membership is not None:
                    membership.park()
                self._park_early()
            case wire.Regroup() if membership is not None:
                membership.regroup(frame)
            case wire.GiveVector() if membership is not None:
                membership.give_vector(frame.epoch)
            case wire.SaveHeld() if membership is not None:
                membership.ask_save(frame)
            case wire.GiveState() | wire.TakeState() if membership is not None:
                membership.order(frame)

    def _hold(self, frame: wire.Cut, membership: Membership | None) -> None:
        if membership is not None:
            membership.hold(frame.epoch)
        elif self.start and self.agent:
            self.agent.send(
                wire.Standing(
                    epoch=frame.epoch,
                    applied=self.start.applied,
                    reductions=0,
                    problem="it is forming its first group",
                )
            )

    def _park_early(self) -> None:
        if (self.session is None or not self.session.settled) and self.start and self.agent:
            self.agent.send(
                wire.Parked(
                    epoch=self.start.epoch,
                    step=self.start.applied,
                    sound=False,
                    why="the epoch ended during start-up",
                )
            )


def run(main: Callable[[Job], None], *, seed: int = 0, exact_reduction: bool = False) -> None:
    """Run `main` as one worker of the job, then end the process.

    Before it calls `main`, it seeds all random numbers from `seed`, in the same way on every rank.
    In a process that `multiprocessing` has started, such as a data worker, it returns at once: such
    a process only imports the script. `sys.exit()` in `main` counts as its return, and with a status
    other than 0 as an error.

    Args:
        main: the training script.
        seed: a whole number.
        exact_reduction: add the gradients of micro-batches as fixed-point integers, in units of
            2**-40. The run is then the same bit for bit, whatever the number of ranks (on the CPU: if
            each computes with the same number of threads). This sends twice the bytes over the
            network and needs more memory for gradients.

    Raises:
        NotUnderAgent: the process was not started by `everstep run`.
        Misuse: `main` is not a function, `seed` not a whole number, `exact_reduction` not a bool,
            it is called within `main`, or the environment selects a way to form groups that is
            unknown or not possible here.
    """
    if data_worker.is_child():
        return
    if not callable(main):
        raise Misuse(
            f"everstep.run({main!r}): give it the function: everstep.run(main), not main()"
        )
    seed = validate.whole("everstep.run: seed", seed)
    exact_reduction = validate.flag("everstep.run: exact_reduction", exact_reduction)
    path = os.environ.get(env.AGENT_SOCKET)
    if not path:
        raise NotUnderAgent(
            "this script was not started by Everstep. Start it with: everstep run "
            f"{os.path.basename(sys.argv[0]) or 'train.py'} ({env.AGENT_SOCKET} is not set)"
        )
    forming.read_setting(os.environ)
    _require_first()
    _prepare()
    registrations.refuse_wrappers()
    session = _join(path, seed, exact_reduction)
    job, rank = Job(session), os.getpid()
    try:
        main(job)
    except BaseException as error:
        if os.getpid() != rank:
            _end_child(error)
        if not _is_plain_end(error):
            _explain(session, error)
    if os.getpid() != rank:
        _end_child(None)
    _finish(session)


def _require_first() -> None:
    """Raises `Misuse` if this process has joined its job before: the agent would wait for both."""
    global _joined
    if _joined:
        raise Misuse(
            "everstep.run was called within main. It is called once in a process, and ends the process. To train "
            "several models, name all of them in job.track, and write a loop over step.batches for each. What is to "
            "follow this job is another `everstep run`"
        )
    _joined = True


_joined = False


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that the script has forked. It is no rank, so the agent is told nothing. Nothing is destroyed: the
    destructor of a gloo group waits for threads that only the rank has.
    """
    status = 0 if error is None else 1
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = error.code or 0
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _is_plain_end(error: BaseException) -> bool:
    """Whether this is `sys.exit()` or `sys.exit(0)`."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _prepare() -> None:
    """Die with the agent, show all stacks on SIGUSR1, print each line at once."""
    defer_dynamo.defer_compiler()
    heap.keep_freed_memory()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(line_buffering=True)


def _join(path: str, seed: int, exact_reduction: bool) -> Session:
    start_up = StartUp()
    page = open_page(os.environ)
    start_up.agent = agent_socket.connect(path, start_up.on_epoch)
    hello = wire.Hello(pid=os.getpid(), protocol=PROTOCOL, in_place=True)
    start_up.agent.send(hello)
    start_up.start = start = start_up.agent.wait_start()
    export_ranks(start, os.environ)
    meter = Meter(page, epoch=start.epoch, applied=start.applied)
    device.claim(start.local_rank)
    session = _build(start_up.agent, start, meter, seed, exact_reduction)
    start_up.session = session
    if start_up.agent.cut.is_set():
        session.membership.park()
    return session


def _build(
    agent: agent_socket.AgentSocket,
    start: wire.Start,
    meter: Meter,
    seed: int,
    exact_reduction: bool,
) -> Session:
    try:
        with meter.charging("wait", waiting=True):
            unit = _form_unit(agent, start)
            formed = group.LocalGroup(unit) if start.join else _form(agent, start, unit)
    except (RuntimeError, TimeoutError) as error:
        why = f"the group could not be formed: {error}"
        agent.send(wire.Parked(epoch=start.epoch, step=start.applied, sound=False, why=why[:500]))
        while True:
            agent.wait_save()
    membership = Membership(
        start,
        formed,
        send=agent.send,
        form=lambda frame, endpoint: _form(
            agent, frame, unit, endpoint, lambda: membership.has_left(frame.epoch)
        ),
        listen=lambda world: forming.listen(world, _address(), forming.read_setting(os.environ)),
        waiting=lambda: meter.charging("wait", waiting=True),
    )
    randomness.seed_all("job", seed)
    try:
        return Session(
            agent=agent,
            membership=membership,
            meter=meter,
            start=start,
            seed=seed,
            exact_reduction=exact_reduction,
        )
    except StateError as error:
        _fail_early(agent, start, error)


def _form_unit(agent: agent_socket.AgentSocket, start: wire.Start) -> Unit | None:
    """Form the groups of this rank's unit. None: each rank is a unit."""
    if start.mesh.unit == 1:
        return None
    return forming.form_unit(agent, _place(start, start.mesh), f"{start.unit}/")


def _form(
    agent: agent_socket.AgentSocket,
    frame: wire.Start | wire.Regroup,
    unit: Unit | None,
    endpoint: meeting.Endpoint | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> group.Group:
    mesh = units.ONE_RANK if unit is None else unit.mesh
    place = replace(_place(frame, mesh, unit), endpoint=endpoint, is_over=is_over)
    if isinstance(frame, wire.Regroup):
        place = replace(place, endpoints=frame.endpoints)
    return forming.form(agent, place, forming.read_setting(os.environ))


def _place(
    frame: wire.Start | wire.Regroup, mesh: units.Mesh, unit: Unit | None = None
) -> forming.Place:
    return forming.Place(frame.epoch, frame.rank, frame.world, _address(), mesh, unit)


def _address() -> str | None:
    return os.environ.get("EVERSTEP_POD_IP")


def export_ranks(start: wire.Start, environ: MutableMapping[str, str]) -> None:
    """Set the variables that torch users expect."""
    world = start.script_world or start.world
    environ["RANK"], environ["WORLD_SIZE"] = str(start.rank), str(world)
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = (
        str(start.local_rank),
        str(start.local_world),
    )
    environ["GROUP_RANK"] = str(start.node_rank)


def open_page(environ: Mapping[str, str]) -> PositionPage | None:
    """Open the position page. The calling thread owns it, and must be the main thread, which
    lives as long as the process.
    """
    path = environ.get(env.POSITION_FILE)
    if not path:
        return None
    page = PositionPage(path)
    page.own()
    os.register_at_fork(after_in_child=page.detach)
    return page


def _finish(session: Session) -> NoReturn:
    """End the process after `main` has returned, or has ended with `sys.exit(0)`."""
    if session.until is None:
        session.fail(
            Cause.SCRIPT_ERROR, "main returned without training: no loop over job.steps(…) ran"
        )
    if not session.finished:
        session.fail(
            Cause.MISUSE,
            f"main returned after step {session.applied}, before until={session.until} (break out "
            "of job.steps, or sys.exit?); a job ends when `until` is reached. To end it earlier, call job.stop() in "
            "its last step, on every rank, and let the loop over job.steps end by itself",
        )
    session.membership.group.tell_end()
    session.agent.send(wire.Finished(epoch=session.epoch, step=session.applied))
    agent = session.agent
    assert isinstance(agent, agent_socket.AgentSocket)
    with session.meter.charging("idle", waiting=True):
        released = agent.wait_release()
    if not released:
        session.park(session.applied, sound=session.is_sound(), why="the epoch ended")
    atexit._run_exitfuncs()
    agent.leave(0)


def _explain(session: Session, error: BaseException) -> NoReturn:
    """End the process after an exception: park if a change of membership explains it, otherwise report it."""
    text = "".join(traceback.format_exception(error))
    shown = script_errors.format_error(error)
    if session.start.mesh.unit > 1 and _of_a_collective(str(error)):
        # Most likely a collective of the unit; others wait for this rank in other collectives.
        session.lose_unit(f"a collective within its unit has failed: {error!r:.200}")
    if session.broken or (_of_a_collective(text) and session.agent.cut.wait(EXPLAIN_SECONDS)):
        _leave(session, f"an error after the epoch ended: {error!r:.200}")
    print(shown.rstrip(), file=sys.stderr, flush=True)
    session.fail(
        classify_error(session, error),
        script_errors.describe_error(error),
        shown[-TRACEBACK_CHARACTERS:],
        fault=describe_place(error),
    )


def _leave(session: Session, why: str) -> NoReturn:
    """Park; at the boundary before the step, if the step is not applied. The collectives of a
    sharded model fail in its forward and backward, and everything that these change can be undone.
    """
    if session.step is not None and session.step.mark is None:
        undo_step.leave(session.step, why)
    session.park(session.applied, sound=session.is_sound(), why=why)


def describe_place(error: BaseException) -> str:
    """Return the exception's type and where it was raised. Two exceptions with the same text count as the same."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return type(error).__name__ + where


def classify_error(session: Session, error: BaseException) -> Cause:
    """Classify an exception by its type alone; the agent knows the texts of device and network faults."""
    if isinstance(error, (Misuse, StateError)):
        return Cause.MISUSE
    if isinstance(error, KeyboardInterrupt):
        return Cause.WORKER_DIED  # SIGINT from outside
    return Cause.USER_ERROR if session.applied else Cause.SCRIPT_ERROR


def _of_a_collective(text: str) -> bool:
    return any(word in text for word in ("gloo", "NCCL", "torch/distributed", "StoreClosed"))


def _fail_early(agent: agent_socket.AgentSocket, start: wire.Start, error: Exception) -> NoReturn:
    agent.send(
        wire.Failed(
            epoch=start.epoch,
            step=start.applied,
            cause=Cause.MISUSE.value,
            message=str(error),
        )
    )
    agent.leave(1)

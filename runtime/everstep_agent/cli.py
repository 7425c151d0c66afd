"""`everstep run | verify | checkpoints | fork | fetch`. `run` is a launcher on a laptop; where an operator
has set the environment, it is the pod's agent.
"""

import argparse
import dataclasses
import fcntl
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from everstep_agent import line_writer
from everstep_agent.command_line import build_parser, list_unused, parse, split_arguments
from everstep_agent.local.conclusion import INTERRUPTED
from everstep_contract import env, report

LAST_WORDS_SECONDS = 10.0
"""How long a blocked terminal may take to accept the last lines of a run on one machine. Then the
process ends without them.
"""

STORE_NEEDS = ("obstore", "blake3", "xxhash")
"""Packages of the extra `runtime` without which no command can read a run."""
RUN_NEEDS = (*STORE_NEEDS, "numpy", "torch")


def main() -> NoReturn:
    """The command of this process's arguments."""
    try:
        _prepare_output()
        if sys.platform != "linux":
            leave(_refuse(f"it needs Linux, and this is {sys.platform}"))
        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # also before a run has begun to catch it
        status = INTERRUPTED
    leave(status)


def _prepare_output() -> None:
    """Make printing work if an output is closed (`>&-`) or cannot show every character."""
    sys.stdout, sys.stderr = sys.stdout or _open_null(), sys.stderr or _open_null()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _open_null() -> io.TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8")


def leave(status: int) -> NoReturn:
    """End the process without finalizing the interpreter, because during finalization obstore's
    threads may abort the process.

    Measured: 21 of 480 processes that read from a store and then ended died of SIGABRT.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            pass
        except OSError as error:  # the disk is full: what was printed is lost
            status = 2
            if stream is sys.stdout:
                _refuse(f"cannot write its output: {error.strerror}")
    os._exit(status)


def run(argv: Sequence[str]) -> int:
    """Run the command and return its exit status. Raises SystemExit for --help and for an invalid
    command line.
    """
    own, script_args = split_arguments(argv)
    arguments = parse(own)
    if problem := _find_folder_problem():
        return _refuse(problem)
    if arguments.command == "run":
        return _run(arguments, script_args)
    if arguments.command in ("verify", "checkpoints", "fork", "fetch"):
        return _read(arguments)
    build_parser().print_help()
    return 2


def _find_folder_problem() -> str:
    """Why relative paths mean nothing; empty: they mean something."""
    try:
        os.getcwd()
    except OSError as error:
        return f"the current folder: {error.strerror}; it was removed or unmounted, change to another one"
    return ""


def find_missing(packages: Sequence[str]) -> str:
    """Which packages are not installed, and what to do; empty: all are. Imports none of them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return (
        f"{', '.join(missing)} not installed for {sys.executable}: install Everstep with its extra `runtime` (in a "
        "checkout: pip install '.[runtime]'; in an image: see examples/README.md)"
    )


def _run(arguments: argparse.Namespace, args: list[str]) -> int:
    if env.in_cluster(os.environ):
        # A container's first process ignores SIGTERM until it has a handler. A blocked signal waits for the agent's.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        with line_writer.unblocked() as output:
            return _run_agent(arguments, args, output)
    if not os.path.isfile(arguments.script):
        return _refuse(_no_script(arguments.script))
    if problem := find_missing(RUN_NEEDS):
        return _refuse(problem)
    from everstep_agent.local import launcher
    from everstep_agent.local.plan import build_plan, find_size_problem

    if problem := find_size_problem(arguments.workers, arguments.spares, arguments.mesh):
        return _refuse(problem)
    plan = build_plan(
        script=arguments.script,
        args=args,
        workers=arguments.workers,
        store=arguments.store,
        run=arguments.run,
        save_every=arguments.save_every,
        keep=arguments.keep,
        hang_seconds=arguments.hang_seconds,
        startup_seconds=arguments.startup_seconds,
        guard_action=arguments.guard_action,
        guard_factor=arguments.guard_factor,
        verbose=arguments.verbose,
        zygote=not arguments.no_zygote,
        preload=arguments.preload or "",
        in_place=arguments.in_place,
        spares=arguments.spares,
        max_redo_seconds=arguments.max_redo_seconds,
        mesh=arguments.mesh,
        drill=arguments.drill,
        folder=os.getcwd(),
    )
    with line_writer.unblocked(LAST_WORDS_SECONDS):
        return launcher.launch(plan)


def _run_agent(arguments: argparse.Namespace, args: list[str], output: line_writer.Output) -> int:
    script = arguments.script
    try:
        settings = env.AgentEnv.from_env(os.environ)
    except env.EnvError as error:
        return _refuse(str(error))
    if not _claim_container(settings.memory):
        return _refuse(
            "this container's agent runs already, and this command has changed nothing. To try a script by hand, give "
            "it a run of its own: env -u EVERSTEP_JOB_UID everstep run …"
        )
    settings = add_options(settings, arguments)
    if unused := list_unused(arguments):
        print(
            f"everstep: {', '.join(unused)} in a pod's command: no effect; the job's spec sets it",
            file=sys.stderr,
        )
    if not os.path.isfile(script):
        return _report_for_good(settings, _no_script(script))
    if problem := find_missing(RUN_NEEDS):
        return _report_for_good(settings, problem)
    from everstep_agent import agent

    return agent.run_agent(settings, script, args, dropped=lambda: output.dropped)


def _claim_container(memory: str) -> bool:
    """Whether this is the container's only agent. The command may be started again by hand (`kubectl exec`); such a
    process must not touch what the agent holds in memory. The lock lasts as long as this process.
    """
    try:
        os.makedirs(memory, exist_ok=True)
        folder = os.open(memory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the agent reports that it cannot use the folder
        return True
    return True


def add_options(settings: env.AgentEnv, arguments: argparse.Namespace) -> env.AgentEnv:
    """Apply the options that the command of a container may have."""
    return dataclasses.replace(
        settings,
        zygote=0 if arguments.no_zygote else settings.zygote,
        preload=arguments.preload or settings.preload,
    )


def _report_for_good(settings: env.AgentEnv, message: str) -> int:
    """Report an end that no restart of the container can fix, as the operator reads it."""
    found = report.ExitReport(
        cause=report.Cause.SCRIPT_ERROR,
        message=message,
        slot=settings.slot,
        attempt=settings.attempt,
    )
    with open(settings.termination_log, "wb") as out:
        out.write(report.encode(found))
    _refuse(message)
    return found.exit_code()


def _no_script(script: str) -> str:
    if os.path.isdir(script):
        return (
            f"{script!r} is a folder: give the script in it, such as {script.rstrip('/')}/train.py"
        )
    place = "" if os.path.isabs(script) else f" in {os.getcwd()}"
    return f"there is no script {script!r}{place}"


def _read(arguments: argparse.Namespace) -> int:
    if problem := find_missing(STORE_NEEDS):
        return _refuse(problem)
    import asyncio

    from everstep_agent.tools import commands

    return asyncio.run(
        commands.read(
            arguments.command,
            arguments.run,
            os.environ,
            step=getattr(arguments, "step", None),
            to=getattr(arguments, "to", ""),
            unpin=getattr(arguments, "unpin", None) or "",
            only=tuple(getattr(arguments, "only", None) or ()),
            as_json=arguments.json,
        )
    )


def _refuse(message: str) -> int:
    print(f"everstep: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()

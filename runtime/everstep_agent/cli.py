"""`everstep run | verify | checkpoints | fork`: a laptop's launcher, or, where an operator has set the environment, the
pod's agent.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from everstep_contract import env, report


def main() -> NoReturn:
    """The console script."""
    leave(run(sys.argv[1:]))


def leave(status: int) -> NoReturn:
    """End without finalizing the interpreter, which obstore's threads may meet and abort.

    Measured: 21 of 480 processes that read from a store and ended at once died of SIGABRT.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


def run(argv: Sequence[str]) -> int:
    """The command's exit status. Raises SystemExit for --help and for a wrong command line."""
    own, script_args = split_arguments(argv)
    arguments = parse(own)
    if arguments.command == "run":
        return _run(arguments, script_args)
    if arguments.command in ("verify", "checkpoints", "fork"):
        return _read(arguments)
    build_parser().print_help()
    return 2


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ours, and what stands behind `--`: the script's."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), list(argv[cut + 1 :])


def parse(own: Sequence[str]) -> argparse.Namespace:
    """Ends the process with the usage if the command line makes no sense."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(describe_unknown(arguments, unknown))
    return arguments


def describe_unknown(arguments: argparse.Namespace, unknown: Sequence[str]) -> str:
    given = " ".join(unknown)
    hint = f"see: everstep {arguments.command} --help"
    if arguments.command == "run":
        hint = (
            f"arguments of the script go behind --: {arguments.script} -- {given}; options: {hint}"
        )
    return f"unrecognized arguments: {given}; {hint}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="everstep", description="Training that outlives the processes it runs in."
    )
    parser.add_argument("--version", action="version", version=f"everstep {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="train: on a laptop with workers of its own, in a cluster as the pod's agent",
        description="Run a training script. Options are for a laptop; in a cluster the job says all of this.",
        usage="everstep run [OPTIONS] SCRIPT [-- ARGS OF THE SCRIPT]",
    )
    run.add_argument(
        "--workers", type=_positive, default=1, metavar="N", help="worker processes (default 1)"
    )
    run.add_argument(
        "--store",
        default="everstep-store",
        metavar="DIR|URI",
        help="folder or s3://… for checkpoints (default ./everstep-store)",
    )
    run.add_argument(
        "--run", metavar="NAME", help="name of the run in the store (default: the script's)"
    )
    run.add_argument(
        "--save-every",
        type=_natural,
        default=50,
        metavar="STEPS",
        help="checkpoint interval in steps, 0 for the last one only (default 50)",
    )
    run.add_argument(
        "--keep", type=_positive, default=3, metavar="N", help="checkpoints to keep (default 3)"
    )
    run.add_argument(
        "--hang-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="a longer step is a hang (default 300)",
    )
    run.add_argument(
        "--guard-action",
        choices=("Note", "SaveAndStop"),
        default="Note",
        help="what to do when the loss or the gradient norm leaps (default Note)",
    )
    run.add_argument(
        "--guard-factor",
        type=float,
        default=10.0,
        metavar="F",
        help="a leap is more than F times the rolling mean, 0 switches it off (default 10)",
    )
    run.add_argument("--verbose", action="store_true", help="show every line of the agents")
    run.add_argument("script", help="the training script; it calls everstep.run(main)")
    _add_readers(commands)
    return parser


def _add_readers(commands: Any) -> None:
    """What needs nothing but a run's address."""
    verify = commands.add_parser(
        "verify",
        help="prove that every step of a run was made of its samples exactly once",
        description="Walk the lineage of a run's newest checkpoint and check its ledger.",
    )
    listing = commands.add_parser(
        "checkpoints",
        help="list the checkpoints that a run can go on from",
        description="Newest first, from the run's log alone.",
    )
    fork = commands.add_parser(
        "fork",
        help="begin another run with an older checkpoint of this one",
        description="Copy one checkpoint and what led to it to a new run; the old one is only read.",
    )
    fork.add_argument("--step", type=_natural, required=True, metavar="N")
    fork.add_argument("--to", required=True, metavar="RUN", help="the new run's folder or URI")
    for parser in (verify, listing, fork):
        parser.add_argument("run", metavar="RUN", help="folder or URI of the run: STORE/NAME")
        parser.add_argument("--json", action="store_true", help="one line of JSON, for programs")


def _run(arguments: argparse.Namespace, args: list[str]) -> int:
    if env.in_cluster(os.environ):
        return _run_agent(arguments.script, args)
    if not os.path.isfile(arguments.script):
        return _refuse(_no_script(arguments.script))
    from everstep_agent import launcher

    return launcher.launch(
        launcher.build_plan(
            script=arguments.script,
            args=args,
            workers=arguments.workers,
            store=arguments.store,
            run=arguments.run,
            save_every=arguments.save_every,
            keep=arguments.keep,
            hang_seconds=arguments.hang_seconds,
            guard_action=arguments.guard_action,
            guard_factor=arguments.guard_factor,
            verbose=arguments.verbose,
            folder=os.getcwd(),
        )
    )


def _run_agent(script: str, args: list[str]) -> int:
    from everstep_agent import agent

    try:
        settings = env.AgentEnv.from_env(os.environ)
    except env.EnvError as error:
        return _refuse(str(error))
    if not os.path.isfile(script):
        return _report_for_good(settings, _no_script(script))
    return agent.run_agent(settings, script, args)


def _report_for_good(settings: env.AgentEnv, message: str) -> int:
    """An end that no restart of the container can mend: the operator reads it from the report."""
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
    return f"there is no script {script!r} in {os.getcwd()}"


def _read(arguments: argparse.Namespace) -> int:
    import asyncio

    from everstep_agent import reading

    return asyncio.run(
        reading.read(
            arguments.command,
            arguments.run,
            os.environ,
            step=getattr(arguments, "step", 0),
            to=getattr(arguments, "to", ""),
            as_json=arguments.json,
        )
    )


def _refuse(message: str) -> int:
    print(f"everstep: {message}", file=sys.stderr)
    return 2


def _positive(text: str) -> int:
    number = _natural(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def _version() -> str:
    try:
        return metadata.version("everstep")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()

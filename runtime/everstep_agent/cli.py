"""`everstep run | verify | checkpoints | fork | fetch`. `run` is a launcher on a laptop; where an operator
has set the environment, it is the pod's agent.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from everstep_agent import line_writer
from everstep_contract import env, report, units
from everstep_contract.names import find_pin_problem

LAST_WORDS_SECONDS = 10.0
"""Limit at the end of a run on one machine for a blocked terminal to accept the last lines; then
the process ends without them.
"""


def main() -> NoReturn:
    """The console script."""
    leave(run(sys.argv[1:]))


def leave(status: int) -> NoReturn:
    """Ends without finalizing the interpreter, during which obstore's threads may abort the
    process.

    Measured: 21 of 480 processes that read from a store and then ended died of SIGABRT.
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
    if arguments.command in ("verify", "checkpoints", "fork", "fetch"):
        return _read(arguments)
    build_parser().print_help()
    return 2


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Everstep's own arguments, and those after `--`, which are the script's."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), list(argv[cut + 1 :])


def parse(own: Sequence[str]) -> argparse.Namespace:
    """Ends the process with the usage message if the command line is invalid."""
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
            f"arguments of the script go after --: {arguments.script} -- {given}; options: {hint}"
        )
    return f"unrecognized arguments: {given}; {hint}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="everstep", description="Training that survives the failure of its processes."
    )
    parser.add_argument("--version", action="version", version=f"everstep {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="train: on a laptop with its own workers, in a cluster as the pod's agent",
        description="Run a training script. The options are for a laptop; in a cluster the job's "
        "spec sets them, except for --preload and --no-zygote.",
        usage="everstep run [OPTIONS] SCRIPT [-- ARGS OF THE SCRIPT]",
    )
    run.add_argument(
        "--workers", type=_positive, default=1, metavar="N", help="worker processes (default 1)"
    )
    run.add_argument(
        "--mesh",
        type=_mesh,
        default=units.ONE_RANK,
        metavar="DIMENSIONS",
        help="how the workers divide the model: shard=2, tensor=2 or shard=2,tensor=2; their product "
        "is a unit, which holds one copy of it, and --workers is a whole number of units (default: "
        "each worker holds the whole model)",
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
        help="limit in seconds for one step; a longer step counts as a hang (default 300)",
    )
    run.add_argument(
        "--max-redo-seconds",
        type=_natural,
        default=30,
        metavar="S",
        help="what a loss may cost that leaves no whole copy of the model: saves are kept in memory accordingly, 0 for "
        "none (default 30)",
    )
    run.add_argument(
        "--guard-action",
        choices=("Note", "SaveAndStop"),
        default="Note",
        help="what to do when the loss or the gradient norm spikes (default Note)",
    )
    run.add_argument(
        "--guard-factor",
        type=float,
        default=10.0,
        metavar="F",
        help="a spike is more than F times the rolling mean, 0 switches the check off (default 10)",
    )
    run.add_argument(
        "--preload",
        type=_modules,
        metavar="MODULE,…",
        help="modules that the zygote imports besides torch, numpy and everstep, so that a new "
        "worker finds them imported; they must not use CUDA or start threads (counts in a cluster, too)",
    )
    run.add_argument(
        "--no-zygote",
        action="store_true",
        help="start each worker as a fresh interpreter instead of forking it from a process that "
        "has imported torch (counts in a cluster, too)",
    )
    run.add_argument(
        "--in-place",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ranks that survive a loss go on in the same step, and the lost one joins them again; "
        "without it, all restart (default: in place)",
    )
    run.add_argument(
        "--drill",
        action="store_true",
        help="kill a rank after a few steps, show what happened, save and stop",
    )
    run.add_argument(
        "--spares",
        type=_natural,
        default=0,
        metavar="N",
        help="workers that wait for the place of a lost one (default 0)",
    )
    run.add_argument("--verbose", action="store_true", help="show every line of the agents")
    run.add_argument("script", help="the training script; it must call everstep.run(main)")
    _add_readers(commands)
    return parser


def _add_readers(commands: Any) -> None:
    """Commands that need only a run's address."""
    verify = commands.add_parser(
        "verify",
        help="prove that every step of a run was made of its samples exactly once",
        description="Walk the lineage of a run's newest checkpoint and check its ledger.",
    )
    listing = commands.add_parser(
        "checkpoints",
        help="list the checkpoints that a run can resume from, and give pins up",
        description="Newest first, from the run log alone.",
    )
    listing.add_argument(
        "--unpin",
        type=_pin,
        metavar="NAME",
        help="give this pin up, so that the checkpoint may be deleted as any other",
    )
    fork = commands.add_parser(
        "fork",
        help="start another run from an older checkpoint of this one",
        description="Copy one checkpoint and its history to a new run; the old run is only read.",
    )
    fork.add_argument("--step", type=_natural, required=True, metavar="N")
    fork.add_argument("--to", required=True, metavar="RUN", help="the new run's folder or URI")
    fetch = commands.add_parser(
        "fetch",
        help="bring a checkpoint's files to this machine; everstep.load does so",
        description="Fetch and verify the parts of one checkpoint. Chunks of a run in a folder stay there.",
    )
    fetch.add_argument(
        "--step",
        type=_natural,
        metavar="N",
        help="of the checkpoint (default: the newest readable)",
    )
    fetch.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="of a tracked object, e.g. model; may be repeated (default: all)",
    )
    fetch.add_argument("--to", required=True, metavar="DIR", help="folder for the files")
    for parser in (verify, listing, fork, fetch):
        parser.add_argument("run", metavar="RUN", help="folder or URI of the run: STORE/NAME")
        parser.add_argument(
            "--json", action="store_true", help="print one line of JSON, for programs"
        )


def _run(arguments: argparse.Namespace, args: list[str]) -> int:
    if env.in_cluster(os.environ):
        with line_writer.unblocked() as output:
            return _run_agent(arguments, args, output)
    if not os.path.isfile(arguments.script):
        return _refuse(_no_script(arguments.script))
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
    from everstep_agent import agent

    script = arguments.script
    try:
        settings = env.AgentEnv.from_env(os.environ)
    except env.EnvError as error:
        return _refuse(str(error))
    settings = add_options(settings, arguments)
    if not os.path.isfile(script):
        return _report_for_good(settings, _no_script(script))
    return agent.run_agent(settings, script, args, dropped=lambda: output.dropped)


def add_options(settings: env.AgentEnv, arguments: argparse.Namespace) -> env.AgentEnv:
    """Those that the command of a container may have."""
    return dataclasses.replace(
        settings,
        zygote=0 if arguments.no_zygote else settings.zygote,
        preload=arguments.preload or settings.preload,
    )


def _report_for_good(settings: env.AgentEnv, message: str) -> int:
    """An end that no restart of the container can fix, in the form that the operator reads."""
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


def _positive(text: str) -> int:
    number = _natural(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def _modules(text: str) -> str:
    names = text.split(",")
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected names of modules, separated by commas: numpy,my_package.model"
        )
    return text


def _mesh(text: str) -> units.Mesh:
    try:
        return units.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pin(text: str) -> str:
    if problem := find_pin_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return text


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

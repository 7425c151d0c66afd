"""The command line of `everstep`: its options, and the error messages for an invalid one."""

import argparse
import math
import os
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from everstep_contract import units
from everstep_contract.names import find_pin_problem

_URI_WITHOUT_SLASHES = re.compile("(file|s3|gs|az):(?!//)")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Everstep's own arguments, and those after `--`, which are the script's."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), list(argv[cut + 1 :])


def parse(own: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. Ends the process with the usage message if they are invalid."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(describe_unknown(arguments, unknown))
    return arguments


def list_unused(arguments: argparse.Namespace) -> list[str]:
    """The options of `everstep run` that have no effect in the command of a container."""
    given = vars(arguments)
    defaults = vars(parse(["run", arguments.script]))
    used = ("preload", "no_zygote", "verbose")
    names = [n for n, value in defaults.items() if n not in used and given[n] != value]
    return ["--no-in-place" if n == "in_place" else f"--{n.replace('_', '-')}" for n in names]


def describe_unknown(arguments: argparse.Namespace, unknown: Sequence[str]) -> str:
    given = " ".join(unknown)
    command = f"{arguments.command} " if arguments.command else ""
    hint = f"see: everstep {command}--help"
    if arguments.command == "run" and "-m" in unknown and not arguments.script.endswith(".py"):
        hint = (
            "give the script's file, as in `python train.py`. If it imports its package, install that, or put the "
            f"folder that holds it in PYTHONPATH; options: {hint}"
        )
    elif arguments.command == "run":
        script, more = _find_script(arguments.script, unknown)
        hint = f"arguments of the script go after --: {script} -- {' '.join(more)}; options: {hint}"
    return f"unrecognized arguments: {given}; {hint}"


def _find_script(first: str, unknown: Sequence[str]) -> tuple[str, list[str]]:
    """The script, and the arguments that were probably meant for it.

    Args:
        first: what was taken for the script. With `--lr 0.1 train.py` it is the value of an unknown option.
    """
    if not first.endswith(".py"):
        for place, given in enumerate(unknown):
            if given.endswith(".py") and not given.startswith("-"):
                return given, [*unknown[:place], first, *unknown[place + 1 :]]
    return first, [*unknown]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="everstep", description="Training that survives the failure of its processes."
    )
    parser.add_argument("--version", action="version", version=f"everstep {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_run(commands)
    _add_readers(commands)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="train: on a laptop with its own workers, in a cluster as the pod's agent",
        description="Run a training script. The options are for a laptop; in a cluster the job's "
        "spec sets them, except for --preload and --no-zygote.",
        usage="everstep run [OPTIONS] SCRIPT [-- ARGS OF THE SCRIPT]",
        allow_abbrev=False,  # else an argument of the script without `--` before it could be an option
    )
    run.add_argument("script", help="the training script; it must call everstep.run(main)")
    run.add_argument("--verbose", action="store_true", help="show every line of the agents")
    _add_sizes(run)
    _add_checkpoints(run)
    _add_recovery(run)
    _add_processes(run)
    _add_guard(run)


def _add_sizes(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("size")
    group.add_argument(
        "--workers", type=_positive, default=1, metavar="N", help="worker processes (default 1)"
    )
    group.add_argument(
        "--mesh",
        type=_mesh,
        default=units.ONE_RANK,
        metavar="DIMENSIONS",
        help="how the workers divide the model: shard=2, tensor=2 or shard=2,tensor=2; their product "
        "is a unit, which holds one copy of it, and --workers is a whole number of units (default: "
        "each worker holds the whole model)",
    )
    group.add_argument(
        "--spares",
        type=_natural,
        default=0,
        metavar="N",
        help="workers that wait for the place of a lost one (default 0)",
    )


def _add_checkpoints(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("checkpoints")
    group.add_argument(
        "--store",
        default="everstep-store",
        type=_place,
        metavar="DIR|URI",
        help="folder or s3://… for checkpoints (default ./everstep-store)",
    )
    group.add_argument(
        "--run",
        type=_text,
        metavar="NAME",
        help="name of the run in the store (default: the script's)",
    )
    group.add_argument(
        "--save-every",
        type=_natural,
        default=50,
        metavar="STEPS",
        help="checkpoint interval in steps, 0 for the last one only (default 50)",
    )
    group.add_argument(
        "--keep", type=_positive, default=3, metavar="N", help="checkpoints to keep (default 3)"
    )


def _add_recovery(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("recovery")
    group.add_argument(
        "--in-place",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ranks that survive a loss go on in the same step, and the lost one joins them again; "
        "without it, all restart (default: in place)",
    )
    group.add_argument(
        "--hang-seconds",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="limit in seconds for one step; a longer step counts as a hang (default 300)",
    )
    group.add_argument(
        "--startup-seconds",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="limit in seconds from the start of a process to the end of its first step (default 600)",
    )
    group.add_argument(
        "--max-redo-seconds",
        type=_natural,
        default=30,
        metavar="S",
        help="how many seconds of training may be repeated after a loss that leaves no complete copy of the model; "
        "saves are kept in memory often enough for that. 0: none are kept (default 30)",
    )
    group.add_argument(
        "--drill",
        action="store_true",
        help="kill a rank after a few steps, show what happened, save and stop",
    )


def _add_processes(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("processes (in a cluster, too)")
    group.add_argument(
        "--preload",
        type=_modules,
        metavar="MODULE,…",
        help="modules to import before workers are forked, besides torch, numpy and everstep, so that a new "
        "worker finds them imported; they must not use CUDA or start threads",
    )
    group.add_argument(
        "--no-zygote",
        action="store_true",
        help="start each worker as a fresh interpreter instead of forking it from a process that "
        "has imported torch",
    )


def _add_guard(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("spikes of loss or gradient norm")
    group.add_argument(
        "--guard-action",
        choices=("Note", "SaveAndStop"),
        default="Note",
        help="what to do when the loss or the gradient norm spikes (default Note)",
    )
    group.add_argument(
        "--guard-factor",
        type=_factor,
        default=10.0,
        metavar="F",
        help="a spike is more than F times the rolling mean, 0 switches the check off (default 10)",
    )


def _add_readers(commands: Any) -> None:
    """Commands that need only a run's address."""
    verify = commands.add_parser(
        "verify",
        help="prove that every step of a run was made of its samples exactly once",
        description="Walk the lineage of a run's newest checkpoint and check its ledger.",
    )
    listing = commands.add_parser(
        "checkpoints",
        help="list the checkpoints that a run can resume from, and remove pins",
        description="Newest first, from the run log alone.",
    )
    listing.add_argument(
        "--unpin",
        type=_pin,
        metavar="NAME",
        help="remove this pin, so that the checkpoint may be deleted like any other",
    )
    fork = commands.add_parser(
        "fork",
        help="start another run from an older checkpoint of this one",
        description="Copy one checkpoint and its history to a new run; the old run is only read.",
    )
    fork.add_argument(
        "--step",
        type=_natural,
        required=True,
        metavar="N",
        help="step of the checkpoint; `everstep checkpoints` lists them",
    )
    fork.add_argument(
        "--to", type=_place, required=True, metavar="RUN", help="the new run's folder or URI"
    )
    fetch = commands.add_parser(
        "fetch",
        help="bring a checkpoint's files to this machine; everstep.load does so",
        description="Fetch and verify the parts of one checkpoint. Chunks of a run in a folder stay there.",
    )
    fetch.add_argument(
        "--step",
        type=_natural,
        metavar="N",
        help="step of the checkpoint (default: the newest readable one)",
    )
    fetch.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="name of a tracked object, e.g. model; may be repeated (default: all)",
    )
    fetch.add_argument(
        "--to", type=_folder, required=True, metavar="DIR", help="folder for the files"
    )
    for parser in (verify, listing, fork, fetch):
        parser.add_argument(
            "run", type=_place, metavar="RUN", help="folder or URI of the run: STORE/NAME"
        )
        parser.add_argument(
            "--json", action="store_true", help="print one line of JSON, for programs"
        )


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds, more than 0")
    return number


def _factor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if number != 0 and not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 (off) or a number from 1 on")
    return number


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; is a variable of the shell not set?")
    return text


def _place(text: str) -> str:
    """A folder or a URI. `s3:/bucket/folder` would be a folder called `s3:`, and `--store=~/x`, in which no shell
    replaces the `~`, one called `~`.
    """
    if found := _URI_WITHOUT_SLASHES.match(text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write {found[0]}//…; for a folder of this name write ./{text}"
        )
    return os.path.expanduser(_text(text))


def _folder(text: str) -> str:
    """A folder of this machine. `s3://bucket/folder` would be one called `s3:`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a folder of this machine; `everstep fork` copies a checkpoint to a store"
        )
    return _place(text)


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

"""`kubectl everstep …`: the command line. Nothing heavy is imported here: see `cluster`."""

import argparse
import importlib
import io
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from everstep_kubectl.cluster import Cluster, ClusterError
from everstep_kubectl.text import escape

_FORMS = ("table", "json", "yaml")
_JOB = "name of the job"


def main() -> NoReturn:
    """The console script `kubectl-everstep`."""
    # Python 3.14 colours --help, and `Shown` would show the escape sequences as text.
    os.environ["PYTHON_COLORS"] = "0"
    sys.stdout, sys.stderr = sys.stdout or _open_null(), sys.stderr or _open_null()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = Shown(sys.stdout), Shown(sys.stderr)
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
        sys.exit(status)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # the disk is full: what was printed is lost
        print(f"kubectl everstep: cannot write its output: {error.strerror}", file=sys.stderr)
        os._exit(2)  # at an ordinary end the same output would be written once more


def _open_null() -> io.TextIOWrapper:
    """For an output that is closed (`>&-`)."""
    return open(os.devnull, "w", encoding="utf-8")


class Shown:
    """A stream that escapes what it shows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, written: str) -> int:
        return self._stream.write(escape(written))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run(argv: Sequence[str]) -> int:
    """Run the command. Return its exit status: 0 success, 1 the command's answer is no, 2 the
    command failed.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "module"):
        parser.print_help()
        return 2
    flags = [f"--{k}={v}" for k in ("context", "kubeconfig") if (v := getattr(arguments, k, None))]
    cluster = Cluster(flags, getattr(arguments, "namespace", None))
    module = importlib.import_module(f"everstep_kubectl.commands.{arguments.module}")
    try:
        return int(getattr(module, arguments.function)(arguments, cluster))
    except BrokenPipeError:
        raise
    except (ClusterError, OSError) as error:  # a file or folder that cannot be written
        print(f"kubectl everstep: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    common = _common()
    parser = argparse.ArgumentParser(
        prog="kubectl everstep",
        parents=[common],
        description="Shows what happened to training jobs, what it cost and whether their state is safe; saves, "
        "suspends and resumes jobs; releases nodes.",
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    add = _Adding(commands, common)
    _add_reading(add)
    _add_checkpoints(commands, common)
    _add_acting(add)
    return parser


class _Adding:
    def __init__(self, commands: Any, common: argparse.ArgumentParser) -> None:
        self._commands, self._common = commands, common

    def __call__(
        self,
        name: str,
        text: str,
        module: str,
        function: str = "run",
        *,
        forms: Sequence[str] = (),
    ) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = self._commands.add_parser(
            name, help=text, description=text, parents=[self._common]
        )
        parser.set_defaults(module=module, function=function)
        if forms:
            parser.add_argument(
                "-o",
                "--output",
                choices=forms,
                default="table",
                help="form of the answer (default table)",
            )
        return parser


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "-n", "--namespace", metavar="NAME", help="namespace (default: the context's)"
    )
    common.add_argument(
        "--context", metavar="NAME", help="context of the kubeconfig, as for kubectl"
    )
    common.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig file, as for kubectl")
    return common


def _add_reading(add: _Adding) -> None:
    status = add("status", "show state, step, age of the last checkpoint", "status", forms=_FORMS)
    status.add_argument(
        "job", nargs="?", metavar="JOB", help="show this job in detail (default: a list of all)"
    )
    status.add_argument(
        "-A", "--all-namespaces", action="store_true", help="jobs of all namespaces"
    )
    timeline = add("timeline", "show incidents as timelines", "timeline", forms=(*_FORMS, "png"))
    timeline.add_argument("job", metavar="JOB", help=_JOB)
    timeline.add_argument(
        "incident", nargs="?", metavar="INCIDENT", help="id of one, or `last` (default: all)"
    )
    timeline.add_argument(
        "--file", metavar="FILE", help="name of the png (default JOB-timeline.png)"
    )
    add("nodes", "show which nodes are out of use, and why", "nodes", forms=_FORMS)
    why = add("why", "show why a node is, or is not, in use", "nodes", "why", forms=_FORMS)
    why.add_argument("node", metavar="NODE", help="name of the node")


def _add_checkpoints(commands: Any, common: argparse.ArgumentParser) -> None:
    text = "read the run in the object store, with a short-lived pod of the job's own image"
    group = commands.add_parser("checkpoints", help=text, description=text, parents=[common])
    group.set_defaults(module="checkpoints", function="usage", parser=group)
    add = _Adding(group.add_subparsers(metavar="COMMAND"), common)
    listing = add("ls", "list the checkpoints, newest first", "checkpoints", "ls", forms=_FORMS)
    verify = add(
        "verify",
        "prove that no step and no sample is missing",
        "checkpoints",
        "verify",
        forms=_FORMS,
    )
    restore = add(
        "restore",
        "print a new job that resumes from an older checkpoint; the old run is not changed",
        "checkpoints",
        "restore",
    )
    restore.add_argument(
        "--step",
        type=_natural,
        required=True,
        metavar="N",
        help="step of the checkpoint; `checkpoints ls` lists them",
    )
    restore.add_argument(
        "--as", dest="new", required=True, metavar="NEWJOB", help="the new job's name"
    )
    restore.add_argument(
        "--run", metavar="NAME", help="name of the new run (default OLDRUN-from-N)"
    )
    unpin = add(
        "unpin", "remove a pin, so that the checkpoint may be deleted", "checkpoints", "unpin"
    )
    for parser in (listing, verify, restore, unpin):
        parser.add_argument("job", metavar="JOB", help=_JOB)
        parser.add_argument(
            "--timeout",
            type=_seconds,
            default=300.0,
            metavar="S",
            help="seconds that the pod may take (default 300)",
        )
    unpin.add_argument("name", metavar="NAME", help="name of the pin; `checkpoints ls` lists them")


def _add_acting(add: _Adding) -> None:
    release = add("release", "release a node from quarantine", "nodes", "release")
    release.add_argument("node", metavar="NODE", help="name of the node")
    _add_timeout(release, 30)
    for name, text in (
        ("suspend", "save a job, end its pods, keep its run"),
        ("resume", "continue a suspended job"),
    ):
        switch = add(name, text, "switch", name)
        switch.add_argument("job", metavar="JOB", help=_JOB)
        switch.add_argument(
            "--no-wait", action="store_true", help="return at once instead of waiting"
        )
        _add_timeout(switch, 300)
    checkpoint = add("checkpoint", "save a checkpoint now, and keep it under a name", "checkpoint")
    checkpoint.add_argument("job", metavar="JOB", help=_JOB)
    checkpoint.add_argument(
        "--pin", required=True, metavar="NAME", help="that name: lower-case letters, digits and '-'"
    )
    checkpoint.add_argument(
        "--no-wait", action="store_true", help="return at once instead of waiting"
    )
    _add_timeout(checkpoint, 300)
    drill = add("drill", "delete one pod of a job that opted in, and watch the recovery", "drill")
    drill.add_argument("job", metavar="JOB", help=_JOB)
    drill.add_argument(
        "--slot",
        type=_natural,
        metavar="N",
        help="slot whose pod is deleted, from 0 (default: the last one)",
    )
    drill.add_argument(
        "--sudden",
        action="store_true",
        help="give the pod a grace period of one second: no time to save",
    )
    _add_timeout(drill, 300)
    report = add("report", "write a support bundle without secrets", "report")
    report.add_argument(
        "job", nargs="?", metavar="JOB", help="name of the job (default: all jobs of the namespace)"
    )
    report.add_argument(
        "--file", metavar="FILE", help="name of the bundle (default everstep-report-<time>.tar.gz)"
    )
    report.add_argument(
        "--log-lines",
        type=_natural,
        default=2000,
        metavar="N",
        help="the last N lines of each container's log (default 2000)",
    )
    report.add_argument(
        "--operator-namespace",
        default="everstep-system",
        metavar="NAME",
        help="namespace of the operator (default everstep-system)",
    )


def _add_timeout(parser: argparse.ArgumentParser, seconds: float) -> None:
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=seconds,
        metavar="S",
        help=f"seconds to wait (default {seconds:.0f})",
    )


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds, more than 0")
    return number


if __name__ == "__main__":
    main()

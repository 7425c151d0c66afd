"""Runs a job beside processes that take the cores, over a network that may be slow and lose packets, and counts the
ranks that are taken for hung, and the sums that are taken for stuck.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from everstep_hang.reading import read_cuts

SCRIPT = Path(__file__).with_name("train.py")
BURN = "while True: sum(range(100_000))"
PROGRESS = "EVERSTEP_HANG_PROGRESS"
END_SECONDS = 30.0
"""Limit for the killed run to be reaped."""
LIMIT_LINK = """
ip link set lo up
tc qdisc add dev lo root tbf rate "$1"mbit burst 256kb latency 100ms
iptables -A OUTPUT -o lo -p tcp -m statistic --mode random --probability "$2" -j DROP
shift 2
exec "$@"
"""
"""Shell script that limits the loopback link and then runs its arguments. It runs in its own
network namespace.
"""
LEARNT_STEPS = 60
"""With fewer steps no limit was learnt, and the run proves nothing."""
AT_MOST = 1
"""How many wrong cuts are allowed: ranks taken for hung, and sums taken for stuck."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started processes end, too
    folder = Path(tempfile.mkdtemp(prefix="everstep-hang-"))
    try:
        with _burning(options.load), _training(options, folder):
            time.sleep(options.seconds)
        steps = int((folder / "progress").read_text() or 0)
        lines = (folder / "output.txt").read_text(errors="replace").splitlines()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _show(lines, steps, options)


def _show(lines: Sequence[str], steps: int, options: argparse.Namespace) -> int:
    cuts = read_cuts(lines)
    for line in (*cuts.learnt, *cuts.stuck, *cuts.other):
        print(line)
    link = (
        f", {options.mbit:g} Mbit/s with {options.loss:g} % of the packets lost"
        if options.mbit
        else ""
    )
    print(
        f"{options.seconds:.0f} s, {steps} steps of {options.ranks} ranks beside {options.load} busy processes on "
        f"{os.cpu_count()} cores{link}: {len(cuts.learnt)} ranks cut out by a learnt limit, {len(cuts.stuck)} sums "
        f"taken for stuck, {len(cuts.other)} other losses"
    )
    if steps < LEARNT_STEPS:
        print(f"fewer than {LEARNT_STEPS} steps: nothing was learnt; --seconds has to be longer")
    wrong = len(cuts.learnt) + len(cuts.stuck)
    return int(wrong > AT_MOST or bool(cuts.other) or steps < LEARNT_STEPS)


@contextlib.contextmanager
def _burning(count: int) -> Iterator[None]:
    """Run `count` busy processes; each takes a core, as far as there are cores."""
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@contextlib.contextmanager
def _training(options: argparse.Namespace, folder: Path) -> Iterator[None]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", PROGRESS: str(folder / "progress")}
    command = [
        sys.executable, "-m", "everstep_agent.cli", "run", "--verbose", "--workers", str(options.ranks),
        "--store", str(folder / "store"), str(SCRIPT),
    ]  # fmt: skip
    if options.mbit:
        limits = (str(options.mbit), str(options.loss / 100))
        command = ["unshare", "-rn", "sh", "-ec", LIMIT_LINK, "sh", *limits, *command]
    (folder / "progress").touch()
    with (folder / "output.txt").open("wb") as sink:
        process = psutil.Popen(command, cwd=folder, stdout=sink, stderr=sink, env=environ)
    try:
        yield
    finally:
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(END_SECONDS)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-hang", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="length of the run (default 120; 3600 for the full run)",
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument(
        "--load",
        type=int,
        default=os.cpu_count() or 1,
        help="number of busy processes (default: the number of cores)",
    )
    parser.add_argument(
        "--mbit",
        type=float,
        default=0.0,
        help="Mbit/s of all connections together; 0: no limit (default)",
    )
    parser.add_argument(
        "--loss",
        type=float,
        default=0.0,
        help="percentage of the packets that are lost; needs --mbit (default 0)",
    )
    return parser.parse_args(argv)

"""Runs one system once, and reads what its ranks measured."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from everstep_steady import workload

HERE = Path(__file__).parent
LIMIT_SECONDS = 300.0


class RunFailed(Exception):
    """Not every rank was measured; the message has the end of the output or the missing ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one run, in seconds per step and MiB."""

    wall_s: float
    """The median over the steps of the slowest rank."""
    cpu_s: float
    """The sum over all ranks and their agents."""
    agents_cpu_s: float
    peak_mib: float
    """That of the largest rank."""


def run(system: str, world: int, steps: int, extra: Mapping[str, str] | None = None) -> Measured:
    """Run `system` (one of `cli.SYSTEMS`) once. Raises `RunFailed`.

    Args:
        extra: more environment variables.
    """
    folder = Path(tempfile.mkdtemp(prefix="everstep-steady-"))
    try:
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
            workload.OUT: str(folder),
            workload.STEPS: str(steps),
            workload.EXACT: "1" if system.endswith("exact") else "",
            **(extra or {}),
        }
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        (_run_everstep if system.startswith("everstep") else _run_ddp)(folder, world, environ)
        return read(folder, world)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path, world: int) -> Measured:
    """Read the figures that the ranks wrote. Raises `RunFailed` if a rank is missing."""
    files = [folder / f"{rank}.json" for rank in range(world)]
    if missing := [file.stem for file in files if not file.exists()]:
        raise RunFailed(f"ranks {', '.join(missing)} wrote no figures")
    ranks = [json.loads(file.read_text()) for file in files]
    agents = sum(r["parent_cpu_s"] for r in ranks)
    return Measured(
        wall_s=max(median(r["step_s"]) for r in ranks),
        cpu_s=sum(r["cpu_s"] for r in ranks) + agents,
        agents_cpu_s=agents,
        peak_mib=max(r["peak_mib"] for r in ranks),
    )


def _run_everstep(folder: Path, world: int, environ: Mapping[str, str]) -> None:
    script = str(HERE / "train_everstep.py")
    command = [sys.executable, "-m", "everstep_agent.cli", "run", "--workers", str(world)]
    command += ["--save-every", "0"]
    _run_all([[*command, "--store", str(folder / "store"), script]], [environ], folder)


def _run_ddp(folder: Path, world: int, environ: Mapping[str, str]) -> None:
    port = _free_port()
    shared = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
    command = [sys.executable, str(HERE / "train_ddp.py")]
    _run_all([command] * world, [{**shared, "RANK": str(r)} for r in range(world)], folder)


def _run_all(
    commands: list[list[str]],
    environs: list[Mapping[str, str]] | list[dict[str, str]],
    folder: Path,
) -> None:
    """Run the commands side by side; on a timeout, kill the rest. Raises `RunFailed`."""
    output = folder / "output.txt"
    with output.open("wb") as sink:
        processes = [
            subprocess.Popen(c, env=dict(e), cwd=folder, stdout=sink, stderr=sink)
            for c, e in zip(commands, environs, strict=True)
        ]
        try:
            ends = [process.wait(LIMIT_SECONDS) for process in processes]
        except subprocess.TimeoutExpired:
            ends = [-1]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    if any(ends):
        raise RunFailed(f"exit codes {ends}: {output.read_text(errors='replace')[-2000:]}")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])

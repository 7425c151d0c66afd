"""Runs one system once and reads what its ranks wrote."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep_agent.pod import worker_environ
from everstep_checkpoint import reading, workload
from everstep_checkpoint.environments import DLROVER
from everstep_checkpoint.reading import Row
from everstep_checkpoint.workload import Plan, Step

HERE = Path(__file__).parent
LIMIT_SECONDS = 900.0
EVERSTEP = "everstep"


class RunFailed(Exception):
    """A process ended with an error; the message contains the end of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    mib: int
    ranks: int
    batch: int
    saves: int
    every: int


def play(system: str, size: Size, peers: Path) -> Row:
    """Run `system` once. `peers`: the Python of the peers' environment. Raises `RunFailed`."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-checkpoint-"))
    try:
        plan = Plan(
            mib=size.mib,
            batch=size.batch,
            steps=size.every * (size.saves + 1) - 1,
            every=size.every,
            folder=str(folder),
        )
        ours = system == EVERSTEP
        (_run_everstep if ours else _run_peer)(system, plan, size.ranks, peers)
        written = _list_commits(folder) if ours else _list_folders(folder)
        return _read(system, plan, size.ranks, written)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _sweep_dlrover(folder.name)


def _run_everstep(system: str, plan: Plan, ranks: int, peers: Path) -> None:
    command = [sys.executable, "-m", "everstep_agent.cli", "run", "--workers", str(ranks)]
    command += ["--save-every", str(plan.every), "--keep", "1", "--run", "bench"]
    command += ["--store", plan.folder + "/store", str(HERE / "train_everstep.py")]
    _run([command], [_environ(plan)], plan.folder)
    load = [sys.executable, str(HERE / "load_everstep.py"), f"file://{plan.folder}/store/bench"]
    _run([[*load, str(ranks)]], [worker_environ.build(_environ(plan), ranks)], plan.folder)


def _run_peer(system: str, plan: Plan, ranks: int, peers: Path) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": str(ranks)}
    if system == DLROVER:  # as torchrun sets them; the name keeps two runs apart
        shared |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
        shared["TORCHELASTIC_RUN_ID"] = Path(plan.folder).name
    command = [str(peers), str(HERE / "train_peer.py"), system]
    environs = [
        {**_environ(plan), **shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)
    ]
    _run([command] * ranks, environs, plan.folder)


def _sweep_dlrover(name: str) -> None:
    """Remove DLRover's shared memory and sockets, which outlive its processes."""
    for memory in Path("/dev/shm").glob(f"{name}_*"):
        memory.unlink()
    shutil.rmtree(Path("/tmp/ckpt_sock") / name, ignore_errors=True)


def _environ(plan: Plan) -> dict[str, str]:
    found = {**os.environ, **plan.to_environ(), "OMP_NUM_THREADS": "1"}
    found["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found


def _run(
    commands: Sequence[Sequence[str]], environs: Sequence[Mapping[str, str]], folder: str
) -> None:
    """Run the commands side by side; on a timeout, kill the rest. Raises `RunFailed`."""
    output = Path(folder) / "output.txt"
    with output.open("ab") as sink:
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


def _read(system: str, plan: Plan, ranks: int, written: Mapping[int, float]) -> Row:
    folder = Path(plan.folder)
    logs = [
        [Step(**row) for row in json.loads((folder / f"rank-{rank}.json").read_text())]
        for rank in range(ranks)
    ]
    cost = reading.judge(logs, plan.every)
    walls = {step.number: step.wall for step in logs[0] if step.number % plan.every == 0}
    size = plan.mib * 2**20
    loads = [json.loads(path.read_text()) for path in folder.glob("load-*.json")]
    speed = {source: size / spent / 1e9 for source, spent in reading.judge_loads(loads).items()}
    memcpy = speed.get("memcpy") or size / workload.measure_memcpy(size) / 1e9
    return Row(
        system=system,
        mib=plan.mib,
        ranks=ranks,
        stall_ms_p50=reading.percentile(cost.stalls, 0.5) * 1e3,
        stall_ms_p99=reading.percentile(cost.stalls, 0.99) * 1e3,
        added_ms_p50=reading.percentile(cost.added, 0.5) * 1e3,
        added_ms_p99=reading.percentile(cost.added, 0.99) * 1e3,
        slowdown=cost.slowdown,
        first_ms=cost.first * 1e3,
        durable_s=reading.find_durable(walls, written),
        bytes=_size_of_newest(folder),
        restore_gbs=speed.get("store"),
        memory_gbs=speed.get("memory"),
        limit_gbs=memcpy,
        tensors_gbs=speed.get("tensors"),
        step_ms=cost.step * 1e3,
    )


def _list_folders(folder: Path) -> dict[int, float]:
    """Step → when the newest file of its checkpoint was written."""
    return {
        int(path.name.removeprefix("step-")): max(
            file.stat().st_mtime for file in path.rglob("*") if file.is_file()
        )
        for path in folder.glob("step-*")
    }


def _list_commits(folder: Path) -> dict[int, float]:
    """Step → when its commit was written to the run log."""
    found = {}
    for path in (folder / "store/bench/log").glob("*.json"):
        entry = json.loads(path.read_text())
        if "manifest" in entry and "step" in entry:
            found[int(entry["step"])] = path.stat().st_mtime
    return found


def _size_of_newest(folder: Path) -> int:
    paths = [*folder.glob("step-*"), *folder.glob("store/bench/chunks")]
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    return sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])

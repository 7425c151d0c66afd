"""The undisturbed run: same script, seed and world size, but no cluster and a folder as store."""

import asyncio
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from everstep_contract.ledger import LedgerEntry
from everstep_demo.runwatch import RunWatch
from everstep_demo.steplog import Applied, StepLog
from everstep_demo.tensors import Checkpoint

RUN = "undisturbed"


class UndisturbedError(Exception):
    """The undisturbed run failed; the message contains the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    ledger: list[LedgerEntry]
    log: list[Applied]
    checkpoint: Checkpoint


async def run_undisturbed(script: Path, folder: Path, *, workers: int, steps: int) -> Undisturbed:
    """Train to the end without a cluster.

    Raises:
        UndisturbedError: the script failed.
    """
    log = _empty(folder) / "output.txt"
    steplog = StepLog(folder / "steps")
    own = {"OMP_NUM_THREADS": "1", "BYTE_LM_STEPS": str(steps), "BYTE_LM_LOG": str(steplog.folder)}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "everstep"), "run", str(script),
            "--workers", str(workers), "--store", str(folder / "store"), "--run", RUN,
            "--save-every", str(steps),
            stdout=out, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **own},
            start_new_session=True,
        )  # fmt: skip
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGTERM)
                await process.wait()
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise UndisturbedError(f"the undisturbed run ended with {status}; {log} ends with:\n{tail}")
    watch = RunWatch((folder / "store").resolve().as_uri(), RUN, {})
    return Undisturbed(
        ledger=await watch.ledger(), log=steplog.read(), checkpoint=await watch.checkpoint()
    )


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder

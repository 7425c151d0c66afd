"""Run ckpt-chaos against Everstep's save path. It kills the agent before the agent creates, renames
or removes a file, or when a file is half written. Then the job is started again, and must end with
the same state.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "ckpt-chaos"
JOB = Path(__file__).with_name("chaos_job.py")
RESUMES = {
    "the pod's memory is kept": [],
    "another pod, without its memory": ["--new-pod"],
}
"""What happens after the kill → arguments of `chaos_job.py`."""


def play(python: Path, points: int, resume: str, folder: Path) -> bool:
    """Run ckpt-chaos and print its verdicts. Returns whether anything failed.

    Args:
        python: the Python of ckpt-chaos's environment.
        points: number of kills.
        resume: one of `RESUMES`.
        folder: for the files that the runs leave behind.
    """
    print(f"ckpt-chaos, {points} kills, {resume}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.absolute())) / "runs"
    job = [sys.executable, str(JOB), "{out}"]
    options = {
        "--work": str(work),
        "--max-points": str(points),
        "--timeout": "120",
        "--step-regex": r"resumed from step (\d+)",
        "--result-file": "{out}/final.bin",
        "--resume-cmd": " ".join([*job, *RESUMES[resume]]),
    }
    command = [str(python.with_name(NAME)), "run"]
    command += [word for option in options.items() for word in option]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, "--", *job], env=environ, check=False).returncode != 0

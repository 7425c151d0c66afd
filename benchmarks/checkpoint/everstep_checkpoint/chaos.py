"""ckpt-chaos against Everstep's save path: the agent is killed before it creates, renames or removes a file, or with a
file half written. The job is started again, and must end with the same state.
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
    """Runs it, and prints its verdicts. Returns whether anything failed.

    Args:
        python: of ckpt-chaos's environment.
        points: how many kills.
        resume: one of `RESUMES`.
        folder: for what the runs leave behind.
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

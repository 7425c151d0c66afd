"""The job that ckpt-chaos kills and restarts ends well if left alone, and continues from what it has committed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import everstep_checkpoint

JOB = Path(everstep_checkpoint.__file__).with_name("chaos_job.py")


def start(folder: Path, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(JOB), str(folder), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, *args: str) -> str:
    output, _ = (job := start(folder, *args)).communicate(timeout=120)
    assert job.returncode == 0, output
    return output


def kill_after_a_commit(folder: Path) -> None:
    job = start(folder)
    assert job.stdout is not None
    committed = next((line for line in job.stdout if "event=committed" in line), "")
    job.send_signal(signal.SIGKILL)
    job.stdout.close()
    job.wait(20)
    assert "step=3" in committed


def test_a_job_that_was_killed_goes_on_from_its_commit_to_the_same_state(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert "resumed from step 0" in run(whole)
    kill_after_a_commit(killed)
    output = run(killed, "--new-pod")
    assert "resumed from step 0" not in output
    assert "resumed from step " in output
    assert (killed / "final.bin").read_bytes() == (whole / "final.bin").read_bytes()

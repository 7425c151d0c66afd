"""Random faults, two at a time, on agents that are separate processes. The run must end with the
exact result, and no state that an unhurt member held may be lost. `EVERSTEP_STORM_SEEDS=1,2,3`
chooses the seeds of the long runs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storm import drive, evidence, plan, witness

TESTS = Path(__file__).parents[1]
APART = (
    "unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child",
)  # fmt: skip
"""Runs a command in its own namespaces. When they end, every process in them ends, too."""
SEEDS = [int(s) for s in os.environ.get("EVERSTEP_STORM_SEEDS", "1,2,3,4,5").split(",")]
BRIEF_SEED = 1
TORCH_SEED = 6


def play(folder: Path, seed: int, rounds: int, *options: str, limit: float) -> str:
    """Play a storm; return its plan, output and journal. Raises AssertionError with the same text if
    the job did not survive.
    """
    command = [
        *APART, sys.executable, "-m", "storm.drive", str(folder),
        f"--seed={seed}", f"--rounds={rounds}", *options,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        said = f"not over in {limit} s"
    finally:
        process.kill()
        process.wait()
    kinds = plan.BRIEF if "--brief" in options else plan.KINDS
    drawn = plan.describe(plan.draw(seed, drive.COUNT, rounds, kinds))
    story = f"seed {seed}, files in {folder}:\n{drawn}\n{said}\n{_happened(folder)}"
    assert process.returncode == 0, story
    return story


def _happened(folder: Path) -> str:
    journal = folder / "journal.jsonl"
    return journal.read_text() if journal.exists() else "nothing had happened yet"


def end_of(folder: Path) -> int:
    return int((folder / "end").read_text())


def verify(folder: Path) -> None:
    """Everstep's own `verify` must accept the same run."""
    command = [sys.executable, "-m", "everstep_agent.cli", "verify", str(folder / "objects")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stdout + said.stderr


def assert_right(folder: Path, seed: int, story: str) -> None:
    found = witness.judge(evidence.read(folder), witness.compute(seed, end_of(folder)))
    assert not found, "\n".join([*found, story])
    verify(folder)


@pytest.mark.timeout(180)
def test_a_job_outlives_a_brief_storm(tmp_path: Path) -> None:
    story = play(tmp_path, BRIEF_SEED, 3, "--brief", limit=150)
    assert_right(tmp_path, BRIEF_SEED, story)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_outlives_a_storm_of_every_fault(tmp_path: Path, seed: int) -> None:
    story = play(tmp_path, seed, len(plan.KINDS) // 2, limit=1100)
    assert_right(tmp_path, seed, story)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_torch_ranks_in_a_storm_end_where_undisturbed_ones_end(tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    for folder, rounds in ((calm, 0), (stormy, 3)):
        folder.mkdir()
        story = play(folder, TORCH_SEED, rounds, "--brief", "--torch", limit=500)
    reference = witness.take(evidence.read(calm))
    assert witness.judge(evidence.read(stormy), reference) == [], story
    verify(stormy)

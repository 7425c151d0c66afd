"""The llama example as a user starts it; its manifest."""

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

import everstep
from everstep_operator import model

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama"


async def train(folder: Path, steps: int, *options: str, compiled: bool = False) -> str:
    """Return what the run prints."""
    env = {"LLAMA_STEPS": str(steps), "LLAMA_COMPILE": str(int(compiled)), "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "everstep_agent.cli", "run", str(EXAMPLE / "train.py"), *options,
        cwd=folder, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache", **env},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(400):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, printed.decode()
    return printed.decode()


async def test_one_rank_trains(tmp_path: Path) -> None:
    assert "committed" in await train(tmp_path, 2)


def test_the_manifest_is_a_job_of_two_units() -> None:
    document = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    spec = model.JobSpec.model_validate(document["spec"])
    assert (spec.parallelism.shard, spec.workers.replicas) == (2, 4)


@pytest.mark.long
async def test_one_rank_goes_on_where_a_unit_of_two_has_stopped(tmp_path: Path) -> None:
    printed = await train(tmp_path, 10, "--workers", "2", "--mesh", "shard=2")
    assert "step   10  loss" in printed
    printed = await train(tmp_path, 12)
    assert "epoch 2: resumes from step 10" in printed
    loaded = await asyncio.to_thread(everstep.load, f"file://{tmp_path}/everstep-store/train")
    assert loaded.step == 12
    assert loaded["model"]["blocks.0.attention.key.weight"].shape == (64, 128)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_each_mesh_trains_to_the_same_loss(tmp_path: Path) -> None:
    """The tolerance is what another order of sums costs in bfloat16."""
    found = []
    for options in (
        [],
        ["--workers", "4", "--mesh", "shard=2,tensor=2"],
        ["--workers", "4", "--mesh", "tensor=2"],
    ):
        folder = tmp_path / "-".join(options[2:] or "1")
        folder.mkdir()
        printed = await train(folder, 10, *options)
        found.append(float(printed.split("step   10  loss ")[1].split()[0]))
    assert torch.tensor(found) == pytest.approx(found[0], abs=0.05)


@pytest.mark.long
@pytest.mark.timeout(450)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++ on a CPU")
async def test_a_compiled_unit_is_lost_and_comes_back_while_the_other_trains_on(
    tmp_path: Path,
) -> None:
    printed = await train(
        tmp_path, 10_000, "--workers", "4", "--mesh", "shard=2", "--drill", compiled=True
    )
    assert "2 of 4 are the same, 2 new" in printed
    assert re.search(r"steps lost +0", printed), printed

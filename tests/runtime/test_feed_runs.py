"""A run whose script was edited between two starts: which samples it used, and what
`everstep verify` says about it.
"""

import asyncio
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from everstep_agent import storage
from everstep_agent.tools.verify import load_ledger

SCRIPT = """
import os, torch
from torch.utils.data import TensorDataset
import everstep

def main(job):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    job.track(model=model, optimizer=optimizer)
    samples = torch.arange(float(os.environ.get("SIZE", "48"))).unsqueeze(1)
    change = os.environ.get("ON_CHANGE", "Refuse")
    data = job.batches(
        TensorDataset(samples), global_batch=int(os.environ["BATCH"]), micro_batch=2, on_change=change
    )
    for step in job.steps(until=int(os.environ["UNTIL"])):
        for (x,) in step.batches(data):
            step.backward(model(x).square().mean())
        optimizer.step()

everstep.run(main)
"""
SECONDS = 120.0


async def everstep(folder: Path, *arguments: str, **environ: object) -> tuple[int, str]:
    """Run the command as a user would; return its status and all its output."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "everstep_agent.cli", *arguments,
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **{n: str(v) for n, v in environ.items()}},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(SECONDS):
            shown, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise
    print(shown.decode())
    return child.returncode or 0, shown.decode()


async def train(folder: Path, **environ: object) -> tuple[int, str]:
    return await everstep(folder, "run", "script.py", **environ)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of 12 samples, so that each of the 48 samples is used once."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "script.py").write_text(SCRIPT)
    status, _ = asyncio.run(train(folder, BATCH=12, UNTIL=4))
    assert status == 0
    return folder


@pytest.fixture
def half_a_run(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path, dirs_exist_ok=True))


async def used(folder: Path) -> list[int]:
    store = storage.open_store(f"file://{folder}/everstep-store/script", "", {}, create=False)
    return [sample for e in await load_ledger(store) for sample in e.samples]


async def test_a_smaller_global_batch_repeats_no_sample_and_verify_says_so(
    half_a_run: Path,
) -> None:
    status, shown = await train(half_a_run, BATCH=6, UNTIL=8)
    assert status == 0
    assert "global_batch was 12, is 6: it goes on with the next unused sample" in shown
    samples = await used(half_a_run)
    assert Counter(samples[:48]) == Counter(range(48))
    assert max(Counter(samples[48:]).values()) == 1
    assert samples[48:] != samples[24:48], "the second half of the first pass once more"
    status, shown = await everstep(half_a_run, "verify", "everstep-store/script")
    assert status == 0
    assert "NOTE    feed 1, step 5: global_batch was 12, is 6" in shown
    assert "ok      steps 1 to 8 once each, 72 samples, none lost or repeated" in shown


async def test_another_dataset_is_refused_unless_the_script_insists(half_a_run: Path) -> None:
    status, shown = await train(half_a_run, BATCH=12, UNTIL=8, SIZE=60)
    assert status == 1
    assert "the run cannot continue exactly after step 4: length was 48 samples, is 60" in shown
    status, shown = await train(half_a_run, BATCH=12, UNTIL=8, SIZE=60, ON_CHANGE="Continue")
    assert status == 0
    status, shown = await everstep(half_a_run, "verify", "everstep-store/script")
    assert status == 1
    assert "PROBLEM feed 1: the order changed at step 5: length was 48 samples, is 60" in shown

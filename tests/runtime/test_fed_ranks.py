"""Ranks with data workers compute the same as ranks without, whichever rank is lost."""

import asyncio
import os
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from everstep import Job, run
from everstep_agent import storage
from everstep_agent.tools.verify import load_ledger
from everstep_contract import wire
from everstep_contract.units import Mesh
from runtime.a_sharded_job import shard_layers
from runtime.an_agent import LIMIT, Agent, agent
from runtime.fed_datasets import Augmented, wait_ready

STEPS, WORLD = 10, 3


def a_script(workers: int, world: int = WORLD) -> Callable[[Job], None]:
    def main(job: Job) -> None:
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        if job._session.start.mesh.shard > 1:
            shard_layers(model, job.mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        job.track(model=model, optimizer=optimizer)
        data = job.batches(
            Augmented(50, seconds=0.001), global_batch=22, micro_batch=2, workers=workers
        )
        if data._workers is not None:
            wait_ready(data)
            print("data workers", job.rank, *data._workers.pids, flush=True)
        for step in job.steps(until=STEPS):
            for batch in step.batches(data):
                step.backward(model(batch).square().mean())
            optimizer.step()
        print("fetched", data.source.dataset.fetched, flush=True)

    return main


def take_all(folder: Path, main: Callable[[Job], None]) -> list[list[wire.Applied]]:
    with agent(folder, lambda: run(main, seed=4), WORLD) as ours:
        ours.finish()
        assert [w.status for w in ours.workers] == [0] * WORLD, ours.output()
        return [w.of(wire.Applied) for w in ours.workers]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[wire.Applied]:
    return take_all(tmp_path_factory.mktemp("undisturbed"), a_script(0))[0]


def list_data_workers(ours: Agent) -> dict[int, list[int]]:
    """Rank → pids of its data workers."""
    lines = [line.split() for line in ours.output().splitlines() if line.startswith("data workers")]
    return {int(rank): [int(pid) for pid in pids] for _, _, rank, *pids in lines}


def assert_ended(pids: list[int]) -> None:
    """Wait until these processes, which are not our children, have ended."""
    for pid in pids:
        try:
            number = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([number], [], [], LIMIT)
            assert ended, f"data worker {pid} still runs"
        finally:
            os.close(number)


def assert_exact(ours: Agent, undisturbed: list[wire.Applied], living: list[int]) -> None:
    """Survivors took each step once, with the same samples as without a loss."""
    assert [ours.workers[r].status for r in living] == [0] * len(living), ours.output()[-6000:]
    first = ours.workers[living[0]].of(wire.Applied)
    assert [a.step for a in first] == list(range(1, STEPS + 1))
    for was, now in zip(undisturbed, first, strict=True):
        assert now.entries[0].samples == was.entries[0].samples
        assert set(now.entries[0].counts) == {1}
        assert now.entries[0].losses == pytest.approx(was.entries[0].losses, rel=1e-4)
    for rank in living[1:]:
        assert [a.entries for a in ours.workers[rank].of(wire.Applied)] == [
            a.entries for a in first
        ]


def test_losses_are_equal_to_the_last_bit_with_and_without_data_workers(
    tmp_path: Path, undisturbed: list[wire.Applied]
) -> None:
    for rank in take_all(tmp_path, a_script(2)):
        assert [a.entries for a in rank] == [a.entries for a in undisturbed]
        assert [a.grad_norm for a in rank] == [a.grad_norm for a in undisturbed]
    fetched = [
        int(line.split()[1])
        for line in (tmp_path / "output").read_text().splitlines()
        if line.startswith("fetched")
    ]
    assert sum(fetched) < STEPS * 22 / 2, "the ranks fetched more than the data workers"


def test_data_workers_end_with_their_rank_and_the_others_take_over_the_same_batches(
    tmp_path: Path, undisturbed: list[wire.Applied]
) -> None:
    with agent(tmp_path, lambda: run(a_script(1), seed=4), WORLD) as ours:
        ours.wait_applied(3, [0, 1, 2])
        ours.kill(1)
        assert_ended(list_data_workers(ours)[1])
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [0, 2])
        assert_ended([pid for pids in list_data_workers(ours).values() for pid in pids])


@pytest.mark.usefixtures("warm_for_units")
def test_a_lost_unit_ends_its_data_workers_and_the_other_unit_takes_over_the_same_batches(
    tmp_path: Path, undisturbed: list[wire.Applied]
) -> None:
    with agent(tmp_path, lambda: run(a_script(1), seed=4), 4, mesh=Mesh(shard=2)) as ours:
        ours.wait_applied(3, range(4))
        ours.kill(1)
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [2, 3])
        assert_ended([pid for pids in list_data_workers(ours).values() for pid in pids])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_regroups_at_random_moments(
    tmp_path: Path, undisturbed: list[wire.Applied], seed: int
) -> None:
    chance = random.Random(seed)
    with agent(tmp_path, lambda: run(a_script(1), seed=4), WORLD) as ours:
        for number in range(WORLD - 1):
            living = [w.rank for w in ours.living]
            ours.wait_applied(2 + 3 * number, living)
            time.sleep(chance.random() * 0.02)
            ours.kill(chance.choice(living))
            ours.regroup()
        survivors = [w.rank for w in ours.living]
        ours.finish()
        assert_exact(ours, undisturbed, survivors)
        assert_ended([pid for pids in list_data_workers(ours).values() for pid in pids])


SCRIPT = """
import os, random, torch
import everstep

class Samples:  # defined here: data workers import this script, which has no guard
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.rand(2) + index + random.random()

def main(job):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    job.track(model=model, optimizer=optimizer)
    workers = int(os.environ["DATA_WORKERS"])
    data = job.batches(Samples(), global_batch=8, micro_batch=2, workers=workers)
    if workers:
        while not all(w.ready for w in data._workers._workers):
            data._workers._receive(None)
        print("data-workers", *data._workers.pids)
    for step in job.steps(until=int(os.environ["UNTIL"])):
        for x in step.batches(data):
            step.backward(model(x).square().mean())
        optimizer.step()

everstep.run(main)
"""


async def everstep(folder: Path, *arguments: str, **environ: object) -> tuple[int, str]:
    """Run the command as a user would; return its status and all its output."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "everstep_agent.cli", *arguments,
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **{n: str(v) for n, v in environ.items()}},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT):
            shown, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        raise
    print(shown.decode())
    return child.returncode or 0, shown.decode()


@pytest.mark.long
async def test_a_run_that_is_resumed_with_data_workers_equals_one_without(tmp_path: Path) -> None:
    losses = {}
    for name, workers, parts in (("with", 2, (3, 6)), ("without", 0, (6,))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        for until in parts:
            status, shown = await everstep(
                folder, "run", "script.py", "--workers", "2", UNTIL=until, DATA_WORKERS=workers
            )
            assert status == 0
            lines = [line for line in shown.splitlines() if "data-workers" in line]
            assert len(lines) == (2 if workers else 0)
            assert_ended([int(pid) for line in lines for pid in line.split()[-workers:] if workers])
        store = storage.open_store(f"file://{folder}/everstep-store/script", "", {}, create=False)
        losses[name] = [(e.step, e.samples, e.losses) for e in await load_ledger(store)]
        status, shown = await everstep(folder, "verify", "everstep-store/script")
        assert status == 0
        assert "steps 1 to 6 once each" in shown
    assert losses["with"] == losses["without"]


GUARDED = SCRIPT.replace("class Samples:", "if __name__ == '__main__':\n  class Samples:").replace(
    "    def __", "      def __"
)


async def test_a_dataset_that_only_the_rank_has_ends_the_job_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(GUARDED)
    status, shown = await everstep(tmp_path, "run", "script.py", UNTIL=3, DATA_WORKERS=1)
    assert status != 0
    assert "a data worker cannot load the dataset: AttributeError: Can't get attribute" in shown
    assert "defined at its top level, outside of main" in shown


@pytest.mark.long
async def test_a_script_that_cannot_be_imported_ends_the_job_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("import everstep", "import everstep\nassert __name__ == '__main__'")
    )
    status, shown = await everstep(tmp_path, "run", "script.py", UNTIL=3, DATA_WORKERS=1)
    assert status != 0
    assert "AssertionError" in shown
    assert "ended with exit status 1 before it was ready; its traceback is above" in shown

"""While torch's compiler works, the limits that the rank has learned from its steps do not apply."""

import asyncio
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.compiling import CompilerWatch
from everstep.meter import Meter
from everstep.stretches import KNOWN_STEPS
from everstep_contract.position import Mark, PositionPage, Stretch, Where


def compile_in_a_step(folder: Path) -> None:
    page = PositionPage(str(folder / "page"), create=True)
    meter = Meter(page, epoch=1, applied=0)
    for _ in range(KNOWN_STEPS + 1):
        meter.enter(Where.STEP, category="step")
    assert page.read_mark().limit > 0

    seen: list[Mark] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(page.read_mark())
        return graph.forward

    watch = CompilerWatch(meter.compiles)
    watch.attach()
    double = torch.compile(lambda x: 2 * x, backend=backend, dynamic=False)
    for size, known in ((1, True), (2, True), (3, False)):
        if not known:
            torch._dynamo.reset()
        watch.attach()
        watch.attach()
        double(torch.ones(size))
        assert page.read_mark().kind is Stretch.COMPUTE
        assert page.read_mark().limit > 0
    assert [(mark.kind, mark.limit) for mark in seen] == [(Stretch.OTHER, 0.0)] * 3
    assert len(torch._dynamo.callback_handler.start_callbacks) == 1


def test_a_compilation_is_no_stretch_of_a_step(tmp_path: Path) -> None:
    """Runs in a fork, so that no other test runs with the compiler loaded."""
    pid = os.fork()
    if pid == 0:
        try:
            compile_in_a_step(tmp_path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0


SCRIPT = """
import time
import torch
import everstep

def main(job):
    def compiler(graph, _):
        time.sleep(5 * job._session.meter.limit)  # as for one elsewhere: nothing of this rank takes CPU time
        print("compiled after", job._session.meter.limit)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=compiler) if job.rank == 1 else None
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(torch.ones(64, 2), global_batch=6, micro_batch=2)
    for step in job.steps(until=100):
        for batch in step.batches(data):
            step.backward(model(batch).mean())
        optimizer.step()
        time.sleep(0.02)
        if double is not None and step.number == 70:
            double(torch.ones(1))

everstep.run(main)
"""


@pytest.mark.long
async def test_a_rank_that_compiles_while_all_others_wait_is_not_cut_out(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "everstep_agent.cli", "run", str(script), "--workers", "3",
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(120):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    said = printed.decode()
    assert process.returncode == 0, said
    assert "compiled after" in said
    assert "interrupted: rank" not in said, said

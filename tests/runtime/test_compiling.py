"""While torch's compiler works, no limit holds that the rank has learnt from its steps."""

import os
import traceback
from pathlib import Path
from typing import Any

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
    """In a fork, so that no other test runs with the compiler loaded."""
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

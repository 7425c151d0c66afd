"""A rank is killed in each phase of a step. The run must continue bit for bit as without the kill.

The cases cover every pair of values of any two columns (phase, world, and each feature on or off).
The test recovers as agents do: the survivors park, one of the furthest saves the full state, and a
new epoch resumes from it.
"""

import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from everstep import Job, boundary, run, step_checks
from everstep.checkpoint_reader import Checkpoint
from everstep_contract import wire
from runtime.a_commit import commit
from runtime.an_agent import Agent, Worker, agent

STEPS, KILL_AT = 8, 5
PHASES = ("computing", "reduced", "applying", "applied")


@dataclass(frozen=True)
class Case:
    phase: str
    world: int
    schedule: bool
    average: bool
    scaler: bool
    norm: bool
    two_optimizers: bool

    @property
    def victim(self) -> int:
        return 0 if self.world == 3 else self.world - 1

    @property
    def name(self) -> str:
        flags = [
            f
            for f in ("schedule", "average", "scaler", "norm", "two_optimizers")
            if getattr(self, f)
        ]
        return "-".join([self.phase, str(self.world), *flags])


CASES = [
    Case(phase, world, *map(bool, flags))
    for phase, world, flags in (
        ("computing", 2, (1, 0, 1, 0, 1)),
        ("computing", 3, (0, 1, 1, 0, 0)),
        ("computing", 4, (0, 0, 0, 1, 0)),
        ("reduced", 2, (0, 0, 0, 0, 0)),
        ("reduced", 3, (0, 0, 0, 1, 1)),
        ("reduced", 4, (1, 1, 1, 0, 1)),
        ("applying", 2, (1, 1, 1, 1, 0)),
        ("applying", 3, (1, 1, 0, 0, 0)),
        ("applying", 4, (0, 0, 0, 0, 1)),
        ("applied", 2, (0, 0, 1, 1, 0)),
        ("applied", 3, (0, 1, 0, 1, 0)),
        ("applied", 4, (1, 1, 1, 0, 1)),
    )
]

QUICK = (
    "computing-2-schedule-scaler-two_optimizers",
    "reduced-3-norm-two_optimizers",
    "applying-3-schedule-average",
    "applied-4-schedule-average-scaler-two_optimizers",
)
"""These cover each value of each column, but not each pair."""


def test_the_quick_ones_are_among_them() -> None:
    assert {c.phase for c in CASES if c.name in QUICK} == set(PHASES)


def test_the_cases_cover_every_pair() -> None:
    rows = [
        (c.phase, c.world, c.schedule, c.average, c.scaler, c.norm, c.two_optimizers) for c in CASES
    ]
    values = [PHASES, (2, 3, 4), *[(False, True)] * 5]
    for one, other in itertools.combinations(range(len(values)), 2):
        wanted = set(itertools.product(values[one], values[other]))
        assert {(row[one], row[other]) for row in rows} >= wanted


def a_script(
    case: Case, mark: str, before: Callable[[Job], None] = lambda job: None
) -> Callable[[Job], None]:
    """Return a training script with the features of the case. It prints a line each time its body
    continues after the loops.
    """

    def main(job: Job) -> None:
        before(job)
        norm: nn.Module = nn.BatchNorm1d(16) if case.norm else nn.Identity()
        body, head = nn.Sequential(nn.Linear(6, 16), norm, nn.Dropout(0.1)), nn.Linear(16, 2)
        both = nn.Sequential(body, head)
        first = torch.optim.AdamW(
            body.parameters() if case.two_optimizers else both.parameters(), lr=0.01
        )
        second = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        objects: dict[str, Any] = {"model": both, "first": first}
        if case.two_optimizers:
            objects["second"] = second
        if case.schedule:
            objects["schedule"] = lr_scheduler.CosineAnnealingLR(first, STEPS)
        if case.average:
            objects["average"] = swa_utils.AveragedModel(both)
        if case.scaler:
            objects["scaler"] = scaler
        job.track(**objects)
        loops = [(body, first), (head, second)] if case.two_optimizers else [(both, first)]
        inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
        dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
        data = job.batches(dataset, global_batch=12, micro_batch=2)
        for step in job.steps(until=STEPS):
            for module, optimizer in loops:
                for x, y in step.batches(data, params=module.parameters()):
                    loss = nn.functional.cross_entropy(both(x), y)
                    die(case, "computing", job, step.number, mark)
                    step.backward(loss, scaler=scaler if case.scaler else None)
                last = optimizer is loops[-1][1]
                if last:
                    die(case, "applying", job, step.number, mark)
                if case.scaler:
                    scaler.step(optimizer)
                else:
                    optimizer.step()
            if case.scaler:
                scaler.update()
            if case.schedule:
                objects["schedule"].step()
            if case.average:
                objects["average"].update_parameters(both)
            print(f"{mark} {job.rank} {step.number} {torch.rand(1).item()}")

    return main


def die(case: Case, phase: str, job: Job, step: int, mark: str) -> None:
    if mark == "first" and (phase, job.rank, step) == (case.phase, case.victim, KILL_AT):
        os.kill(os.getpid(), signal.SIGKILL)


def set_the_trap(case: Case) -> Callable[[Job], None]:
    """Return a patch that kills the victim in the two phases that are inside the library."""

    def trap(job: Job) -> None:
        last_loop = 2 if case.two_optimizers else 1
        finite, ask = step_checks.require_finite, boundary._ask

        def reduced(step: Any, feed: Any, summary: Any) -> None:
            if step.reductions + 1 == last_loop:
                die(case, "reduced", job, step.number, "first")
            finite(step, feed, summary)

        def applied(session: Any) -> Any:
            die(case, "applied", job, session.applied, "first")
            return ask(session)

        step_checks.require_finite = reduced
        boundary._ask = applied

    return trap


def lines(ours: Agent, mark: str, rank: int) -> dict[int, list[str]]:
    """Return what the body printed after its loops: step → the random numbers drawn there, one for
    each time that it ran.
    """
    found: dict[int, list[str]] = {}
    for line in ours.output().splitlines():
        match line.split():
            case [own, number, step, drawn] if own == mark and number == str(rank):
                found.setdefault(int(step), []).append(drawn)
    return found


def losses(worker: Worker, upto: int = STEPS) -> dict[int, Any]:
    return {
        a.step: [replace(e, epoch=0) for e in a.entries]
        for a in worker.of(wire.Applied)
        if a.step <= upto
    }


def whole_state(folder: Path, workers: list[Worker]) -> tuple[dict[str, torch.Tensor], Any]:
    said = commit(folder, [w.of(wire.Staged)[-1] for w in workers])
    checkpoint = Checkpoint(said["manifest"], said["places"])
    tensors = {t.name: checkpoint.tensor(t.name).clone() for t in checkpoint.manifest.tensors}
    return tensors, checkpoint.manifest.state


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.long] * (c.name not in QUICK)) for c in CASES],
    ids=lambda case: case.name,
)
def test_a_killed_rank_costs_no_step_and_changes_no_bit(case: Case, tmp_path: Path) -> None:
    undisturbed, disturbed, resumed = (tmp_path / n for n in ("undisturbed", "first", "second"))
    for folder in (undisturbed, disturbed, resumed):
        folder.mkdir()
    with agent(undisturbed, lambda: run(a_script(case, "whole"), seed=2), case.world) as ours:
        ours.finish()
        expected = losses(ours.workers[0])
        drawn = lines(ours, "whole", 0)
        expected_state = whole_state(undisturbed, ours.workers)

    script = a_script(case, "first", set_the_trap(case))
    with agent(disturbed, lambda: run(script, seed=2), case.world) as ours:
        parked = cut_after_the_death(ours, case.victim)
        target = max(p.step for p in parked.values())
        saver = min(r for r, p in parked.items() if p.step == target)
        assert parked[saver].sound, parked
        assert target >= (KILL_AT if case.phase == "applied" else KILL_AT - 1)
        ours.workers[saver].send(wire.Save(epoch=1, step=target))
        ours.wait_for(lambda w: bool(w.of(wire.Staged)), [saver])
        (staged,) = ours.workers[saver].of(wire.Staged)
        assert (staged.whole, staged.lead, staged.step) == (True, True, target)
        before, body_before = losses(ours.workers[saver], target), lines(ours, "first", saver)
        start = commit(disturbed, [staged])

    second = a_script(case, "second")
    with agent(resumed, lambda: run(second, seed=2), case.world, epoch=2, **start) as ours:
        ours.finish()
        assert before | losses(ours.workers[0]) == expected
        body = {s: d for s, d in body_before.items() if s <= target} | lines(ours, "second", 0)
        assert body == drawn
        assert all(len(times) == 1 for times in body.values())
        state, tree = whole_state(resumed, ours.workers)
    assert tree == expected_state[1]
    for name, value in expected_state[0].items():
        assert torch.equal(state[name], value), name


def cut_after_the_death(ours: Agent, victim: int) -> dict[int, wire.Parked]:
    """Do what the agents do after a death: tell all other ranks that the epoch is over."""
    ours.wait_ended([victim])
    others = [r for r in range(ours.world) if r != victim]
    for rank in others:
        ours.workers[rank].send(wire.Cut(epoch=1))
    ours.wait_for(lambda w: bool(w.of(wire.Parked)), others)
    return {rank: ours.workers[rank].of(wire.Parked)[0] for rank in others}

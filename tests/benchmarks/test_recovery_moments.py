"""Unit tests of the moments at which the runs of the recovery benchmark get their faults."""

from itertools import pairwise

import pytest

from everstep_recovery.lines import Line
from everstep_recovery.moments import find_moment, find_phase

STEP, PHASE = 0.2, 0.75


def steps(until: int) -> list[Line]:
    return [
        Line(t=STEP * n, began=0.0, pid=1, step=n, rank=0, world=1, samples=())
        for n in range(1, until + 1)
    ]


@pytest.mark.parametrize("runs", [3, 7, 12, 24])
def test_the_faults_of_any_number_of_runs_spread_over_the_step(runs: int) -> None:
    phases = sorted(find_phase(run, seed=1) for run in range(runs))
    gaps = [later - earlier for earlier, later in pairwise([*phases, phases[0] + 1])]
    assert max(gaps) < 2 / runs
    assert max(phases) < 1


def test_a_seed_gives_the_same_moments_again_and_another_seed_gives_others() -> None:
    assert find_phase(2, seed=1) == find_phase(2, seed=1)
    assert find_phase(2, seed=1) != find_phase(2, seed=2)


@pytest.mark.parametrize("least", [2.01, 2.14, 2.16, 2.31])
def test_the_fault_comes_at_its_part_of_the_next_step_that_can_be_met(least: float) -> None:
    moment = find_moment(steps(10), PHASE, least)
    assert least <= moment < least + STEP
    assert (moment - STEP * 10) / STEP % 1 == pytest.approx(PHASE)

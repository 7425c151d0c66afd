"""The arithmetic of `make bench-steady`, and one short run of two systems with two ranks."""

import random
from pathlib import Path

import numpy as np
import pytest

from everstep_steady import tracing
from everstep_steady.interleaving import Schedule, interleave
from everstep_steady.marks import Block, measure, read_marks
from everstep_steady.statistics_of import pair


def test_a_ratio_is_that_of_neighbours_and_its_interval_holds_the_mean() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = pair([[1.1 * d for d in drift]], [drift])
    assert found.mean == pytest.approx(1.1)
    assert (found.low, found.high) == pytest.approx((1.1, 1.1)), (
        "if both drift alike, the ratio does not change"
    )
    noisy = pair([[1.0, 1.1, 1.2, 1.3, 1.4]], [[1.0] * 5])
    assert noisy.mean == pytest.approx(1.2)
    assert noisy.low < noisy.mean < noisy.high


def test_an_interval_holds_what_differs_from_start_to_start() -> None:
    found = pair([[1.0] * 3, [1.1] * 3, [1.2] * 3], [[1.0] * 3] * 3)
    assert found.mean == pytest.approx(1.1)
    assert (found.low, found.high) == pytest.approx((1.0, 1.2)), "many rounds make it no smaller"


def marks_of(steps: int, wall: float, cpu: float) -> np.ndarray:
    """Marks of shape [steps, 2], from second 0 on."""
    return np.outer(np.arange(steps), [wall, cpu])


def test_a_block_measures_the_steps_within_it() -> None:
    block = Block(system="everstep", begin=10.0, end=11.0, agents_cpu_s=0.02)
    found = measure(block, [marks_of(1000, 0.05, 0.03), marks_of(1000, 0.1, 0.04)])
    assert found.wall_s == pytest.approx(0.1), "the slowest rank counts"
    assert found.agents_cpu_s == pytest.approx(0.002)
    assert found.cpu_s == pytest.approx(0.03 + 0.04 + 0.002)


def test_a_file_tells_the_steps_so_far(tmp_path: Path) -> None:
    assert read_marks(tmp_path / "0-1.marks").shape == (0, 2)
    whole = np.zeros((10, 2))
    whole[:4] = marks_of(5, 0.1, 0.05)[1:]
    whole.tofile(tmp_path / "0-1.marks")
    assert read_marks(tmp_path / "0-1.marks").tolist() == whole[:4].tolist()


@pytest.mark.long
def test_both_sides_train_side_by_side() -> None:
    schedule = Schedule(starts=2, rounds=2, seconds=0.2, settle_seconds=0.2)
    runs, peaks = interleave(["everstep", "ddp"], 2, schedule, chance=random.Random(1), tell=print)
    counts = {system: [len(start) for start in found] for system, found in runs.items()}
    assert counts == {"everstep": [2, 2], "ddp": [2, 2]}
    every = [m for found in runs.values() for start in found for m in start]
    assert all(m.wall_s > 0 and m.cpu_s > 0 for m in every)
    assert runs["everstep"][0][0].agents_cpu_s > 0
    assert runs["ddp"][0][0].agents_cpu_s == 0
    assert min(peaks.values()) > 100


def test_the_part_of_a_reduction_under_the_backward_pass_is_measured():
    def event(name: str, begin: float, length: float) -> dict:
        return {"ph": "X", "name": name, "ts": begin, "dur": length}

    events = [
        event("autograd::engine::evaluate_function: AddmmBackward0", 0, 4000),
        event("autograd::engine::evaluate_function: TanhBackward0", 3000, 3000),
        event("gloo:all_reduce", 4000, 1000),
        event("gloo:all_reduce", 5000, 3000),
        event("aten::add", 0, 9000),
        {"ph": "M", "name": "gloo:all_reduce"},
    ]
    found = tracing.measure_overlap(events)
    assert (found.reduction_ms, found.hidden_ms) == (4.0, 2.0)
    assert str(found) == "2.0 of 4.0 ms of reductions (50%) lie under the backward pass"
    assert str(tracing.measure_overlap([])).startswith("0.0 of 0.0 ms of reductions (0%)")

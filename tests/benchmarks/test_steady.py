"""The arithmetic of `make bench-steady`, and one short run of each system with two ranks."""

import json
from pathlib import Path

import pytest

from everstep_steady import launching, tracing, workload
from everstep_steady.statistics_of import pair


def test_a_ratio_is_that_of_neighbours_and_its_interval_holds_the_median() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = pair([1.1 * d for d in drift], drift)
    assert found.median == pytest.approx(1.1)
    assert (found.low, found.high) == pytest.approx((1.1, 1.1)), "a drift of both is no difference"
    noisy = pair([1.0, 1.1, 1.2, 1.3, 1.4], [1.0] * 5)
    assert noisy.median == pytest.approx(1.2)
    assert noisy.low < noisy.median < noisy.high


def test_a_rank_without_figures_fails_the_run(tmp_path: Path) -> None:
    figures = {"step_s": [0.1, 0.3, 0.2], "cpu_s": 0.1, "parent_cpu_s": 0.01, "peak_mib": 500.0}
    (tmp_path / "0.json").write_text(json.dumps(figures))
    found = launching.read(tmp_path, 1)
    assert (found.wall_s, found.cpu_s, found.agents_cpu_s) == (0.2, pytest.approx(0.11), 0.01)
    with pytest.raises(launching.RunFailed, match="ranks 1 wrote no figures"):
        launching.read(tmp_path, 2)


@pytest.mark.long
@pytest.mark.parametrize("system", ["everstep", "ddp"])
def test_both_sides_train_and_measure_every_rank(system: str) -> None:
    found = launching.run(system, 2, workload.WARM_UP + 10)
    assert found.wall_s > 0
    assert found.cpu_s > 0
    assert (found.agents_cpu_s > 0) == (system == "everstep")
    assert found.peak_mib > 100


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

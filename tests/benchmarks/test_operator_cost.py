"""The table of the operator's costs shows each measured figure beside the earlier one."""

from everstep_scale import operator_cost


def test_each_row_is_measured_and_has_a_figure_from_before() -> None:
    before = operator_cost.load_before()
    found = [
        *operator_cost.measure_large_job(100),
        *operator_cost.measure_waiting_jobs(100),
        *operator_cost.measure_nodes(100),
    ]
    assert {(f.name, f.size) for f in found} == {key for key in before if key[1] == 100}
    shown = operator_cost.render(found, before)
    assert len(shown.splitlines()) == len(found) + 1


def test_what_does_not_grow_any_more() -> None:
    """These figures are counts, not times."""
    found = {f.name: f.value for f in operator_cost.measure_large_job(2_000)}
    assert found["status write, one slot of so many"] < 400
    waiting = {f.name: f.value for f in operator_cost.measure_waiting_jobs(1_000)}
    assert waiting["passes of jobs without nodes"] == 0
    assert operator_cost.count_named(1_000) <= 64
    assert operator_cost.count_remembered(1_000) == 0

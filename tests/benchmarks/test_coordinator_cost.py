"""The costs of the coordinator's decisions are comparable with earlier figures."""

from everstep_scale import coordinator_cost


def test_each_row_has_its_figure_of_before() -> None:
    before = coordinator_cost.load_before()
    found = [*coordinator_cost.measure_log(1_000), *coordinator_cost.measure_reports(64)]
    assert {(c.name, c.size) for c in found} <= set(before)
    assert len(before) == 2 * len(coordinator_cost.ENTRIES) + 2 * len(coordinator_cost.AGENTS)
    shown = coordinator_cost.render(found, before)
    assert "1.669" in shown
    assert len(shown.splitlines()) == 1 + len(found)

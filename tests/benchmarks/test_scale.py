"""A small run of `make bench-scale`. As long as nothing changes, nothing is written."""

import dataclasses

import pytest

from everstep_lab.exporter.gpu import build_gpu
from everstep_operator.health import parse
from everstep_operator.health.rules.registry import load_rules
from everstep_operator.jobs.plan import QUIET_SECONDS
from everstep_scale import cli, meter, table
from everstep_scale.bench import Bench
from everstep_scale.exporters import Exporters
from everstep_scale.objects import GPUS, Size
from own_lab import own_lab

NETWORK = 74
STEADY_SECONDS = QUIET_SECONDS + 2.0
"""Long enough for a pass of every job: a training job's figures are written by one."""

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


async def test_where_nothing_changes_nothing_is_written() -> None:
    config = cli.build_config()
    flags = (*config.operator_args, "--figures-seconds=1", "--agent-seconds=0.5")
    with own_lab(dataclasses.replace(config, operator_args=flags), NETWORK) as lab:
        async with lab.api() as api:
            bench = Bench(lab, api, Size(jobs=5, nodes=20), STEADY_SECONDS, print)
            phases = await bench.run()
    print(table.render(phases))
    assert cli.find_problems(phases) == []
    by_name = {phase.name: phase for phase in phases}
    assert by_name["quiet"].asked > 0
    assert by_name["training"].usage.calls["PATCH"] > 0
    assert set(by_name["training"].usage.calls) <= {"GET", "PATCH"}
    assert by_name["first start"].usage.calls["PATCH"] == 20
    assert by_name["new operator"].asked > 0


def test_calls_are_summed_over_identities_and_troubles_told() -> None:
    name = "everstep_operator_api_calls_total"
    page = (
        f'{name}{{identity="operator",outcome="Done",verb="GET"}} 3.0\n'
        f'{name}{{identity="nodes",outcome="Done",verb="GET"}} 1.0\n'
        f'{name}{{identity="nodes",outcome="Conflict",verb="PATCH"}} 2.0\n'
    )
    assert meter.parse_calls(page) == ({"GET": 4, "PATCH": 2}, {"Conflict": 2})


def test_jobs_that_do_not_fit_are_refused_with_what_they_need() -> None:
    with pytest.raises(ValueError, match="need 400 nodes, and there are 300"):
        Size(jobs=200, nodes=300).check()


def test_a_page_names_its_node_and_gpus_and_only_its_energy_moves() -> None:
    exporters = Exporters(nodes={})
    first, later = (exporters.page("gpu-007", now) for now in (0.0, 60.0))
    found, moved = (parse.parse_page(page, load_rules().metrics) for page in (first, later))
    assert found.hostname == "gpu-007"
    assert set(found.gpus) == {build_gpu(0, "gpu-007", index).uuid for index in range(GPUS)}
    assert all(moved.gpus[u].energy > gpu.energy for u, gpu in found.gpus.items())  # type: ignore[operator]
    assert len(first) == len(later)
    assert sum(a != b for a, b in zip(first.split(b"\n"), later.split(b"\n"), strict=True)) == GPUS

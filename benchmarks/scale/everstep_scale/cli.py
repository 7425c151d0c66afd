"""The command line of the benchmark."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator

from everstep_lab import Lab
from everstep_lab.config import LabConfig
from everstep_lab.seam import LabError
from everstep_scale import coordinator_cost, operator_cost
from everstep_scale.bench import OPERATOR_FLAGS, Bench
from everstep_scale.objects import Size
from everstep_scale.table import Phase, render

LONGEST_SECONDS = 1200.0
"""Time limit of one run's phases; with the default sizes they take 6 to 12 minutes on two busy
cores.
"""
DAY = 86_400
"""Long, because the simulated kubelets post heartbeats less often than a lab expects."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench-scale",
        description="Measures what many jobs and nodes cost the operator and the API server.",
    )
    parser.add_argument(
        "--jobs", type=int, default=200, metavar="N", help="number of jobs (default 200)"
    )
    parser.add_argument(
        "--nodes", type=int, default=500, metavar="N", help="number of nodes (default 500)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="length of each steady phase (default 60)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure only what single decisions cost, without a cluster (about a minute)",
    )
    arguments = parser.parse_args()
    print(operator_cost.render(operator_cost.measure(), operator_cost.load_before()))
    print(coordinator_cost.render(coordinator_cost.measure(), coordinator_cost.load_before()))
    if arguments.quick:
        return 0
    size = Size(jobs=arguments.jobs, nodes=arguments.nodes)
    phases: list[Phase] = []
    try:
        size.check()
        with Lab(build_config(), say=_say) as lab:
            phases = asyncio.run(measure(lab, size, arguments.seconds))
    except* (LabError, ValueError) as found:
        for error in list_leaves(found):
            print(f"bench-scale: {error}", file=sys.stderr)
    except* KeyboardInterrupt:
        print("\nbench-scale: stopped; the lab is down and its files are removed", file=sys.stderr)
    return report(size, phases) if phases else 1


def report(size: Size, phases: list[Phase]) -> int:
    print(f"\n{size.jobs} jobs, {size.nodes} nodes\n{render(phases)}")
    problems = find_problems(phases)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def list_leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from list_leaves(each)
        else:
            yield each


def build_config() -> LabConfig:
    return LabConfig(nodes=0, operator=False, operator_args=OPERATOR_FLAGS, node_grace_seconds=DAY)


async def measure(lab: Lab, size: Size, seconds: float) -> list[Phase]:
    try:
        async with asyncio.timeout(LONGEST_SECONDS), lab.api() as api:
            return await Bench(lab, api, size, seconds, _say).run()
    except TimeoutError:
        text = f"not done after {LONGEST_SECONDS:.0f} s: give it a quieter machine, or fewer --jobs and --nodes"
        raise LabError(text) from None


def find_problems(phases: list[Phase]) -> list[str]:
    """List the phases without changes in which the operator or the API server counted writes."""
    quiet = [phase for phase in phases if phase.name in ("quiet", "new operator")]
    return [
        f"{phase.name}: {phase.usage.writes} writes, {phase.changed} objects changed; expected none"
        for phase in quiet
        if phase.usage.writes or phase.changed
    ]


_BEGAN = time.monotonic()


def _say(text: str) -> None:
    print(f"{time.monotonic() - _BEGAN:7.1f}  {text}", flush=True)

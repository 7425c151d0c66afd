"""`make demo`: exits 0 only if all checks of the report pass."""

import argparse
import asyncio
import sys
from pathlib import Path

from everstep_demo import demo
from everstep_demo.keeping import keep_logs
from everstep_demo.reference import UndisturbedError
from everstep_demo.timeline import Timeline
from everstep_lab import Lab
from everstep_lab.config import LabConfig
from everstep_lab.seam import LabError

BUILD = demo.REPOSITORY / "build" / "demo"
NODES, GPUS_PER_NODE, CORDON_BUDGET = 5, 2, 2


async def _play(timeline: Timeline) -> bool:
    timeline.heading("A Kubernetes control plane with simulated GPU nodes")
    config = LabConfig(
        nodes=NODES,
        gpus_per_node=GPUS_PER_NODE,
        operator_args=(f"--cordon-budget={CORDON_BUDGET}", "--figures-seconds=0.5"),
    )
    with Lab(config, say=lambda text: timeline.say("lab", text)) as lab:
        timeline.say("up", f"{NODES} nodes with {GPUS_PER_NODE} GPUs each; operator installed")
        async with lab.api() as api:
            try:
                report = await demo.Demo(lab, api, timeline, BUILD).play()
            except BaseException:
                print(
                    f"\ndemo: logs are kept in {_shown(keep_logs(lab, BUILD / 'logs'))}",
                    file=sys.stderr,
                )
                raise
    print(f"\n  {_shown(BUILD / 'report.png')}\n  {_shown(BUILD / 'report.json')}")
    for problem in report["problems"]:
        print(f"  FAILED: {problem}", file=sys.stderr)
    if report["ok"]:
        print("\n  Passed: no step lost, no sample lost or repeated, losses equal to the last bit.")
    return bool(report["ok"])


def _shown(path: Path) -> str:
    return str(path.relative_to(demo.REPOSITORY))


def main() -> int:
    about = "A real training job loses two GPUs, and is compared with an undisturbed run. Takes about three minutes."
    argparse.ArgumentParser(description=about).parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        return 0 if asyncio.run(_play(Timeline())) else 1
    except KeyboardInterrupt:
        print("\ndemo: stopped; the lab is down and its files are removed", file=sys.stderr)
        return 130
    except (LabError, demo.DemoError, UndisturbedError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

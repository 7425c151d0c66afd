"""The complete demo: start a job, play two acts, await its end, run it undisturbed, report."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from everstep_contract.ledger import LedgerEntry
from everstep_demo import act, chart, faults, reference, steplog, tensors
from everstep_demo.board import Board, Object, Pod, condition, is_true
from everstep_demo.compare import compare
from everstep_demo.report import build_report, build_table
from everstep_demo.runwatch import RunWatch
from everstep_demo.steplog import StepLog
from everstep_demo.story import ACTS, Act, Incident, Measured
from everstep_demo.timeline import Timeline
from everstep_lab import Lab
from everstep_lab.api import Api

REPOSITORY = Path(__file__).parents[3]
MANIFEST = REPOSITORY / "examples" / "byte-lm" / "job.yaml"
SCRIPT = REPOSITORY / "examples" / "byte-lm" / "train.py"
STEADY_STEPS = 35
"""Steps between two acts, so that the loss curve shows that training continued."""


class DemoError(Exception):
    """The demo cannot continue; the message says what was awaited and what was found."""


class Demo:
    def __init__(self, lab: Lab, api: Api, timeline: Timeline, build: Path) -> None:
        self._lab, self._timeline, self._build = lab, timeline, build
        self._log = StepLog(build.resolve() / "steps")
        self._job: Object = build_job(self._log)
        self._name = str(self._job["metadata"]["name"])
        self._board = Board(api)
        uri = self._job["spec"]["checkpoint"]["uri"]
        self._watch = RunWatch(uri, f"default/{self._name}", lab.store_environment)

    async def play(self) -> dict[str, Any]:
        """Run everything on the lab and compare; write the report's files and return the report."""
        await self._start()
        incidents: list[Incident] = []
        for number in ACTS:
            await self._until_steady()
            incidents.append(await act.play(self._stage(), number))
        end = await self._finish()
        ledger, checkpoint = await self._watch.ledger(), await self._watch.checkpoint()
        await self._board.delete(self._name)
        undisturbed = await self._undisturbed()
        differences = tensors.list_differences(checkpoint, undisturbed.checkpoint)
        measured = Measured(
            incidents=tuple(incidents),
            quarantined_nodes=end.quarantined,
            goodput=end.goodput,
            completed=self._watch.done,
            seconds=end.seconds,
            logs=steplog.compare_logs(self._log.read(), undisturbed.log, steps=self._steps),
            tensors=len(checkpoint.tensors),
            tensor_differences=tuple(differences),
            problems=tuple(_late(incidents)),
        )
        return self._report(measured, ledger, undisturbed.ledger)

    async def _start(self) -> None:
        self._timeline.heading("A training job on three GPUs")
        await self._board.create(self._job)
        shown = MANIFEST.relative_to(REPOSITORY)
        self._timeline.say("applied", f"{shown}: {self._replicas} workers")

    async def _until_steady(self) -> None:
        """Wait until the run has a commit and the current epoch has taken STEADY_STEPS steps."""
        await self._watch.refresh()
        began = await self._step()
        epoch = self._watch.epoch
        async with self._limit(180, f"{STEADY_STEPS} steps in one epoch"):
            while True:
                await asyncio.sleep(0.3)
                await self._watch.refresh()
                if self._watch.epoch != epoch:
                    began, epoch = await self._step(), self._watch.epoch
                    self._timeline.say("running", f"epoch {epoch} from step {began}")
                if epoch and self._watch.committed and await self._step() >= began + STEADY_STEPS:
                    break
        job = await self._board.job(self._name)
        loss = job["status"].get("loss")
        step = f"step {await self._step()}, loss {loss:.3f}" if loss is not None else ""
        self._timeline.say(
            "steady", f"{step}, checkpoint of step {self._watch.committed} committed"
        )

    async def _finish(self) -> "_End":
        self._timeline.heading("To the end")
        async with self._limit(240, "the job Complete"):
            while not is_true(job := await self._board.job(self._name), "Complete"):
                if is_true(job, "Failed"):
                    failed = condition(job, "Failed") or {}
                    raise DemoError(f"the job failed: {str(failed.get('message'))[:600]}")
                await asyncio.sleep(0.5)
        await self._watch.refresh()
        complete = condition(job, "Complete") or {}
        self._timeline.say("complete", complete.get("message", ""))
        quarantined = [q["spec"]["nodeName"] for q in await self._board.quarantines()]
        return _End(
            quarantined=tuple(sorted(quarantined)),
            goodput=_share(job["status"].get("goodput")),
            seconds=self._timeline.seconds,
        )

    async def _undisturbed(self) -> reference.Undisturbed:
        self._timeline.heading("The same run, undisturbed")
        steps = self._steps
        folder = self._build / "undisturbed"
        self._timeline.say(
            "started", f"everstep run train.py --workers {self._replicas}, no cluster"
        )
        found = await reference.run_undisturbed(SCRIPT, folder, workers=self._replicas, steps=steps)
        ledger = found.ledger
        self._timeline.say("ended", f"{len(ledger)} steps, last loss {ledger[-1].loss:.6f}")
        return found

    def _report(
        self, measured: Measured, ledger: list[LedgerEntry], undisturbed: list[LedgerEntry]
    ) -> dict[str, Any]:
        report = build_report(measured, compare(ledger, undisturbed))
        (self._build / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        chart.draw(self._build / "report.png", ledger, undisturbed, measured.incidents)
        self._timeline.heading("Summary")
        print(build_table(report))
        return report

    def _stage(self) -> act.Stage:
        return act.Stage(
            job=self._name,
            board=self._board,
            watch=self._watch,
            timeline=self._timeline,
            fault=self._fault,
            log=self._log,
        )

    async def _fault(self, pod: Pod, played: Act) -> str:
        return await asyncio.to_thread(faults.break_gpu, self._lab, pod, played.xid)

    async def _step(self) -> int:
        status = (await self._board.job(self._name)).get("status", {})
        return int(status.get("step") or 0)

    def _limit(self, seconds: float, awaited: str) -> "_Limit":
        return _Limit(seconds, awaited, self._explain)

    async def _explain(self) -> str:
        status = (await self._board.job(self._name)).get("status", {})
        return f"{status.get('state')}: {status.get('message')}"

    @property
    def _replicas(self) -> int:
        return int(self._job["spec"]["workers"]["replicas"])

    @property
    def _steps(self) -> int:
        container = self._job["spec"]["workers"]["template"]["spec"]["containers"][0]
        return next(int(e["value"]) for e in container["env"] if e["name"] == "BYTE_LM_STEPS")


def build_job(log: StepLog) -> Object:
    """The example's manifest; its script logs its steps in the demo's folder, which the lab's pods
    can write.
    """
    job: Object = yaml.safe_load(MANIFEST.read_text())
    container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "BYTE_LM_LOG", "value": str(log.folder)})
    return job


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """The state of the job and its nodes when the job became Complete."""

    quarantined: tuple[str, ...]
    goodput: float
    seconds: float


class _Limit:
    """Like `asyncio.timeout`, but the error says what was awaited and the job's state."""

    def __init__(self, seconds: float, awaited: str, explain: Any) -> None:
        self._seconds, self._awaited, self._explain = seconds, awaited, explain
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            found = await self._explain()
            raise DemoError(
                f"waited {self._seconds:.0f} s for: {self._awaited}; the job is {found}"
            ) from None


def _share(text: str | None) -> float:
    """`61.2%` or `0.612` as a fraction; 0 if there is none."""
    if not text:
        return 0.0
    return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)


def _late(incidents: list[Incident]) -> list[str]:
    return [
        f"act {incident.act.number}: '{milestone}' was not reached in time"
        for incident in incidents
        for milestone in incident.missed
    ]

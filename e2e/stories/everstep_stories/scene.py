"""What a story works with: cluster, installation, board, recorder, and fault injection."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from everstep_demo import act, faults
from everstep_demo.board import Board, Object, Pod
from everstep_demo.runwatch import RunWatch
from everstep_demo.story import FIRST_STEP, Act, Incident
from everstep_demo.trial import Trial
from everstep_lab.api import Api
from everstep_stories import jobs
from everstep_stories.clusters import Cluster, NotHereError
from everstep_stories.figures import Recorder
from everstep_stories.jobs import BATCH, DATASET, URI
from everstep_stories.samples import Account, build_account
from everstep_stories.system import System

Fault = Callable[[Pod], Awaitable[object]]


class Scene:
    def __init__(
        self, cluster: Cluster, system: System, api: Api, namespace: str, recorder: Recorder
    ) -> None:
        self.cluster, self.system, self.api = cluster, system, api
        self.namespace, self.recorder = namespace, recorder
        self.board = Board(api, namespace)
        self._broken: set[str] = set()
        self._started: set[str] = set()
        self._store_away = False

    def trial(self, name: str) -> Trial:
        watch = RunWatch(URI, f"{self.namespace}/{name}", self.cluster.store_environment)
        return Trial(name, self.board, watch)

    async def start(self, job: Object, *, lasting: bool = False) -> Trial:
        """Apply the job, unless it exists. `lasting`: it is for the next stories, too."""
        name = job["metadata"]["name"]
        if not await self.board.exists(name):
            await self.board.create(job)
            if not lasting:
                self._started.add(name)
        return self.trial(name)

    async def play(
        self,
        trial: Trial,
        title: str,
        fault: Fault,
        *,
        slot: int,
        limit: float = 150.0,
        pod_stays: bool = False,
    ) -> Incident:
        """Inject the fault on the slot's pod; return once all workers take steps again, and record
        the figures.

        `pod_stays`: the slot's next worker runs in the same pod. Raises AssertionError with the
        job's state if there is no new step within `limit` seconds.
        """
        known = await trial.steps_lost()

        async def played(pod: Pod, _: Act) -> str:
            await fault(pod)
            return title

        stage = act.Stage(
            job=trial.name,
            board=self.board,
            watch=trial.watch,
            timeline=self.recorder.timeline,
            fault=played,
        )
        self.recorder.say("plays", title)
        played_act = Act(title="", slot=slot, pod_stays=pod_stays)
        seen = await act.play(stage, played_act, limit=limit)
        outcome = self.recorder.outcome
        outcome.phases += list(seen.reached.items())
        outcome.first_step = seen.reached.get(FIRST_STEP)
        assert outcome.first_step is not None, (
            f"no new step within {limit:.0f} s of: {title}. {await trial.explain()}"
        )
        outcome.steps_lost = await trial.steps_lost() - known
        return seen

    async def choose_pod(self, trial: Trial, slot: int) -> Pod:
        """The job's pod of this slot; another one if a spare has taken the slot's place."""
        pod = await self.board.current_pod(trial.name, slot)
        return pod if pod is not None else (await self.board.pods(trial.name))[-1]

    async def break_gpu(self, pod: Pod, xid: int) -> None:
        self._broken.add(pod.node)
        await asyncio.to_thread(faults.break_gpu, self.cluster, pod, xid, self.namespace)

    async def break_node(self, node: str, **fields: object) -> None:
        self._broken.add(node)
        await asyncio.to_thread(self.cluster.fault, node, **fields)

    async def stop_store(self) -> None:
        self._store_away = True
        await asyncio.to_thread(self.cluster.objectstore_stop)

    async def break_store(self, fault: str) -> str:
        """`fault`: hang or refuse."""
        found = getattr(self.cluster, f"objectstore_{fault}", None)
        if found is None:
            raise NotHereError(
                f"the object store of this cluster cannot {fault}; the kind lab's can"
            )
        self._store_away = True
        return str(await asyncio.to_thread(found))

    async def start_store(self) -> None:
        await asyncio.to_thread(self.cluster.objectstore_start)
        self._store_away = False

    async def kubectl(self, *arguments: str, check: bool = True, timeout: float = 120.0) -> str:
        """Run kubectl in the jobs' namespace."""
        return await asyncio.to_thread(
            self.cluster.kubectl, "-n", self.namespace, *arguments, check=check, timeout=timeout
        )

    async def check_samples(
        self, trial: Trial, *, dataset: int = DATASET, batch: int = BATCH
    ) -> Account:
        """Check that every sample was used as often as it should be.

        Args:
            dataset: the number of samples in the dataset.
            batch: the number of samples in a step.
        """
        account = build_account(await trial.watch.ledger(), dataset=dataset, batch=batch)
        self.recorder.outcome.samples_lost = account.lost
        assert account.exact, account
        assert account.steps > 0, "the ledger is empty"
        self.recorder.say("ledger", f"{account.steps} steps, every sample used once per pass")
        return account

    async def verify(self, trial: Trial) -> str:
        """Run `everstep verify` as a user with the store's credentials; it must find no problem.
        Return its output.
        """
        said = await asyncio.to_thread(self._verify, f"{URI}/{self.namespace}/{trial.name}")
        self.recorder.say("verify", said.strip().splitlines()[-1])
        return said

    def _verify(self, run: str) -> str:
        command = Path(sys.executable).parent / "everstep"
        done = subprocess.run(
            [command, "verify", run], text=True, capture_output=True, timeout=60, check=False,
            env={**os.environ, **self.cluster.store_environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    async def until_further(self, trial: Trial, steps: int = 5, *, limit: float = 60.0) -> None:
        """Wait until the job has taken `steps` more steps."""
        goal = await trial.step() + steps

        async def further() -> bool:
            return await trial.step() >= goal

        await trial.until(f"step {goal}", further, limit=limit)

    @contextlib.contextmanager
    def timed(self, phase: str, detail: str = "") -> Iterator[None]:
        """Time a phase of the story; print and record it when it ends."""
        began = time.monotonic()
        yield
        self.recorder.phase(phase, time.monotonic() - began, detail)

    async def tidy(self, *, failed: bool) -> None:
        """Restore the cluster for the next story: heal and release nodes, start the store. A story that has failed may
        have left a job that holds GPUs.
        """
        for name in self._started if failed else ():
            if await self.board.exists(name):
                await self.board.delete(name)
        if self._store_away:
            await self.start_store()
        for broken in sorted(self._broken):
            await asyncio.to_thread(self.cluster.heal, broken)
        for quarantine in await self.board.quarantines():
            await self.board.release(quarantine["metadata"]["name"])
        for name, node in (await self.board.nodes()).items():
            if node.cordoned:
                await self._until_free(name)

    async def _until_free(self, node: str, limit: float = 30.0) -> None:
        end = time.monotonic() + limit
        while (await self.board.nodes())[node].cordoned:
            assert time.monotonic() < end, f"{node} is still cordoned {limit:.0f} s after release"
            await asyncio.sleep(0.3)

    def build_job(self, name: str, **fields: object) -> Object:
        return jobs.build_job(name, **fields)  # type: ignore[arg-type]

"""One pod on a node: its containers run for real until they end or the pod is deleted."""

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from everstep_lab import procs
from everstep_lab.node import container as containers
from everstep_lab.node import devices, environment, images, launch, probes, status, volumes
from everstep_lab.node.backoff import Backoff, BackoffRule, is_restarted
from everstep_lab.node.clock import utc_now
from everstep_lab.node.errors import ConfigError, ImageError, NotSimulatedError

Object = dict[str, Any]
_RETRY = 1.0


class Host(Protocol):
    """What a pod needs of its node."""

    place: environment.Place
    images: Path
    mark: str
    backoff: BackoffRule
    powered: asyncio.Event
    """Cleared between a power loss and the reboot."""

    async def fetch(self, kind: str, namespace: str, name: str) -> Object | None:
        """A ConfigMap or Secret, None if there is none; waits while the API server is away."""

    def changed(self, pod: "Pod") -> None: ...

    def event(self, pod: Object, kind: str, reason: str, message: str) -> None: ...

    def allocate(self, pod: "Pod", container: str, count: int) -> Sequence[str] | None:
        """UUIDs for this container; None if there are not so many."""


@dataclass(slots=True)
class Life:
    """What the pod knows of one of its containers."""

    spec: Object
    record: status.Container
    gpus: Sequence[str] = ()
    process: containers.ContainerProcess | None = None


class Pod:
    """`run` lives as long as the containers do; `stop` ends them and lets `run` return."""

    def __init__(self, document: Object, host: Host, folders: volumes.Folders, ip: str) -> None:
        self.document = document
        self.uid: str = document["metadata"]["uid"]
        self.name: str = document["metadata"]["name"]
        self.namespace: str = document["metadata"]["namespace"]
        self.folders = folders
        self._host = host
        self._place = replace(host.place, pod_ip=ip)
        self._start = utc_now()
        self._stopping = asyncio.Event()
        self._failed: status.Failed | None = None
        self._sources = environment.Sources(config_maps={}, secrets={})
        self._ids = itertools.count(1)
        self.lives = {c["name"]: Life(c, _new(c)) for c in document["spec"]["containers"]}
        self.over = False
        """Nothing of it runs and nothing will."""

    @property
    def ip(self) -> str:
        return self._place.pod_ip

    def build_status(self, now: datetime) -> Object:
        state = status.PodState(
            containers=[life.record for life in self.lives.values()],
            host_ip=self._place.host_ip, pod_ip=self.ip, start_time=self._start,
            failed=self._failed,
        )  # fmt: skip
        return status.build_status(self.document, state, now)

    def log_file(self, container: str, *, previous: bool = False) -> Path | None:
        """The log of the container's last life, or of the one before; None if there is none."""
        life = self.lives.get(container)
        if life is None:
            return None
        path = self._life_folder(life, life.record.restarts - (1 if previous else 0)) / "log"
        return path if path.exists() else None

    def is_running(self, container: str) -> bool:
        life = self.lives.get(container)
        return life is not None and life.process is not None

    @property
    def stopped(self) -> bool:
        return self._stopping.is_set()

    def update(self, document: Object) -> None:
        """The pod's object as the API server has it; an older one than ours changes nothing."""
        if _version(document) >= _version(self.document):
            self.document = document

    def fail(self, reason: str, message: str) -> None:
        self._failed = status.Failed(reason=reason, message=message)

    def lose_memory(self) -> None:
        """A power loss: volumes in memory are empty afterwards."""
        shutil.rmtree(self.folders.memory, ignore_errors=True)
        for volume in self.document["spec"].get("volumes") or []:
            self.folders.volume(volume).mkdir(parents=True, exist_ok=True)

    async def run(self) -> None:
        try:
            if self._admit():
                await self._prepare()
                async with asyncio.TaskGroup() as group:
                    for life in self.lives.values():
                        group.create_task(self._live(life))
        finally:
            self.over = True
            self._host.changed(self)

    def terminate(self) -> None:
        """Begin to stop: SIGTERM to each main process, no more restarts."""
        self._stopping.set()
        for life in self.lives.values():
            if life.process:
                life.process.terminate()

    def kill(self) -> None:
        self._stopping.set()
        for life in self.lives.values():
            if life.process:
                life.process.kill()

    def processes(self) -> list[int]:
        """Everything below the shims, then the shims themselves."""
        alive = [life.process for life in self.lives.values() if life.process]
        below = [pid for process in alive for pid in process.processes()]
        return [*below, *(process.shim for process in alive)]

    # --- until the containers can start ---------------------------------------------------------

    def _admit(self) -> bool:
        for life in self.lives.values():
            wanted = devices.count_wanted(life.spec)
            gpus = self._host.allocate(self, life.record.name, wanted) if wanted else ()
            if gpus is None:
                self._failed = status.Failed(
                    reason="UnexpectedAdmissionError",
                    message="Pod was rejected: Allocate failed due to requested number of devices "
                    f"unavailable for {devices.RESOURCE}. Requested: {wanted}, which is unexpected",
                )
                return False
            life.gpus = gpus
        self._host.changed(self)
        return True

    async def _prepare(self) -> None:
        """ConfigMaps, Secrets and volumes; waits for what is missing until the pod is stopped."""
        while not self._stopping.is_set():
            try:
                volumes.check_pod(self.document["spec"])
                await self._fetch_sources()
                volumes.apply_volumes(self.document, self._sources, self._place, self.folders)
                return
            except NotSimulatedError as error:
                self._wait_all("CreateContainerConfigError", str(error))
                await self._stopping.wait()
            except ConfigError as error:
                self._wait_all("ContainerCreating", f"MountVolume.SetUp failed: {error}")
                await self._pause(_RETRY)

    async def _fetch_sources(self) -> None:
        maps, secrets = volumes.list_references(self.document["spec"])
        self._sources = environment.Sources(
            config_maps=await self._fetch("ConfigMap", maps),
            secrets=await self._fetch("Secret", secrets),
        )

    async def _fetch(self, kind: str, names: set[str]) -> dict[str, Mapping[str, bytes]]:
        found: dict[str, Mapping[str, bytes]] = {}
        for name in sorted(names):
            document = await self._host.fetch(kind, self.namespace, name)
            if document is not None:
                found[name] = volumes.decode_content(kind, document)
        return found

    # --- a container's lives --------------------------------------------------------------------

    async def _live(self, life: Life) -> None:
        policy = self.document["spec"].get("restartPolicy", "Always")
        backoff = Backoff(rule=self._host.backoff)
        while not self._stopping.is_set():
            command = await self._command(life)
            if command is None:
                return
            ended = await self._one_life(life, command)
            await self._host.powered.wait()
            if not is_restarted(policy, ended.exit_code) or self._stopping.is_set():
                return
            began = ended.started_at or ended.finished_at
            backoff = backoff.after((ended.finished_at - began).total_seconds())
            await self._wait_restart(life, backoff.delay)
            backoff = backoff.next()

    async def _command(self, life: Life) -> containers.Command | None:
        """None when the pod is stopped before the command can be built."""
        while not self._stopping.is_set():
            try:
                return await self._build_command(life)
            except ImageError as error:
                await self._wait_image(life, str(error))
            except (ConfigError, ValueError) as error:
                self._wait_one(life, "CreateContainerConfigError", str(error))
                await self._pause(_RETRY)
                await self._fetch_sources()
            except NotSimulatedError as error:
                self._wait_one(life, "CreateContainerConfigError", str(error))
                await self._stopping.wait()
        return None

    async def _wait_image(self, life: Life, why: str) -> None:
        first = not isinstance(life.record.state, status.Waiting) or not (
            life.record.state.reason.startswith(("ErrImage", "ImagePull"))
        )
        if first:
            self._wait_one(life, "ErrImagePull", why)
            self._event("Warning", "Failed", why)
            await self._pause(_RETRY)
        image = life.spec["image"]
        self._wait_one(life, "ImagePullBackOff", f'Back-off pulling image "{image}": {why}')
        await self._pause(2 * _RETRY)

    async def _one_life(self, life: Life, command: containers.Command) -> containers.Ended:
        folder = self._life_folder(life, life.record.restarts)
        process = await containers.start_container(command, folder / "spec.json", self._host.mark)
        life.process = process
        number = f"lab://{self.uid}/{life.record.name}/{next(self._ids)}"
        try:
            if await process.started():
                ended = await self._while_running(life, process, number)
            else:
                ended = await process.wait()
        finally:
            life.process = None
        self._record_end(life, ended, number)
        return ended

    async def _while_running(
        self, life: Life, process: containers.ContainerProcess, number: str
    ) -> containers.Ended:
        assert process.started_at is not None
        running = status.Running(started_at=process.started_at)
        self._update(life, state=running, container_id=number, started=False, ready=False)
        self._event("Normal", "Started", f"Started container {life.record.name}")
        if self._stopping.is_set():
            process.terminate()
        async with _background(self._probe(life, process)):
            return await process.wait()

    async def _probe(self, life: Life, process: containers.ContainerProcess) -> None:
        def unhealthy(why: str) -> None:
            self._event("Warning", "Unhealthy", f"{why}; container {life.record.name} is restarted")
            process.kill()

        effects = probes.Effects(
            started=lambda: self._update(life, started=True),
            ready=lambda good: self._update(life, ready=good),
            unhealthy=unhealthy,
        )
        await probes.probe_container(life.spec, self.ip, effects)

    def _record_end(self, life: Life, ended: containers.Ended, number: str) -> None:
        if not self._host.powered.is_set():
            code, reason = 255, "Unknown"  # containerd after a reboot has no exit status
        else:
            code, reason = ended.exit_code, "Completed" if ended.exit_code == 0 else "Error"
        message = ended.failed_to_start or self._message(life, code)
        state = status.Terminated(
            exit_code=code, signal=ended.signal, message=message, container_id=number,
            reason="StartError" if ended.failed_to_start else reason,
            started_at=ended.started_at, finished_at=ended.finished_at,
        )  # fmt: skip
        self._update(life, state=state, started=False, ready=False, container_id=number)

    async def _wait_restart(self, life: Life, delay: float) -> None:
        last = life.record.state
        assert isinstance(last, status.Terminated)
        if delay > 0:
            where = f"container={life.record.name} pod={self.name}_{self.namespace}({self.uid})"
            message = f"back-off {delay:g}s restarting failed {where}"
            waiting = status.Waiting(reason="CrashLoopBackOff", message=message)
            self._update(life, state=waiting, last=last)
            self._event("Warning", "BackOff", message)
            await self._pause(delay)
        if self._stopping.is_set():
            self._update(life, state=last)
        else:
            life.record = replace(life.record, last=last, restarts=life.record.restarts + 1)

    # --- building a life ------------------------------------------------------------------------

    async def _build_command(self, life: Life) -> containers.Command:
        """Raises `ImageError`, `ConfigError` or `NotSimulatedError`."""
        image = images.load_image(self._host.images, life.spec["image"])
        env = environment.build_env(life.spec, self.document, self._sources, self._place)
        order = launch.Order(
            container=life.spec, image=image, env=env, hostname=self.name, gpus=life.gpus,
            mounts=volumes.map_mounts(self.document, life.spec, self.folders),
            folder=self._life_folder(life, life.record.restarts),
            marks={procs.MARK: self._host.mark, containers.POD_MARK: self.uid},
        )  # fmt: skip
        return await asyncio.to_thread(launch.apply_order, order)

    def _life_folder(self, life: Life, restarts: int) -> Path:
        folder = self.folders.disk / "containers" / life.record.name / str(restarts)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _message(self, life: Life, code: int) -> str:
        folder = self._life_folder(life, life.record.restarts)
        message = launch.read_message(folder)
        fallback = life.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if not message and fallback and code != 0:
            return procs.tail(folder / "log", 80)[-2048:]
        return message

    # --- telling --------------------------------------------------------------------------------

    def _wait_one(self, life: Life, reason: str, message: str) -> None:
        self._update(life, state=status.Waiting(reason=reason, message=message))

    def _wait_all(self, reason: str, message: str) -> None:
        self._event("Warning", reason, message)
        for life in self.lives.values():
            self._wait_one(life, reason, message)

    def _update(self, life: Life, **changes: Any) -> None:
        record = replace(life.record, **changes)
        if record != life.record:
            life.record = record
            self._host.changed(self)

    def _event(self, kind: str, reason: str, message: str) -> None:
        self._host.event(self.document, kind, reason, message)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past `stop`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


def _version(document: Object) -> int:
    return int(document["metadata"].get("resourceVersion") or 0)


def _new(container: Object) -> status.Container:
    waiting = status.Waiting(reason="ContainerCreating")
    return status.Container(name=container["name"], image=container["image"], state=waiting)


@contextlib.asynccontextmanager
async def _background(work: Awaitable[None]) -> AsyncIterator[None]:
    """Run `work` while the block runs; its own failure is an error of the lab."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

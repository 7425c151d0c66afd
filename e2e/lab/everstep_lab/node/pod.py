"""One pod on a node. Its containers run as real processes until they end or the pod is deleted."""

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
    """What a pod needs from its node."""

    place: environment.Place
    images: Path
    mark: str
    backoff: BackoffRule
    powered: asyncio.Event
    """Cleared between a power loss and the reboot."""

    async def fetch(self, kind: str, namespace: str, name: str) -> Object | None:
        """Fetch a ConfigMap or Secret. Waits while disconnected. None: it does not exist."""

    def changed(self, pod: "Pod") -> None: ...

    def event(self, pod: Object, kind: str, reason: str, message: str) -> None: ...

    def allocate(self, pod: "Pod", container: str, count: int) -> Sequence[str] | None:
        """Allocate GPUs to this container. Returns their UUIDs, or None if there are too few."""


@dataclass(slots=True)
class PodContainer:
    """The state of one container of the pod."""

    spec: Object
    record: status.Container
    gpus: Sequence[str] = ()
    process: containers.ContainerProcess | None = None


class Pod:
    """`run` returns when no container runs or will run again. `terminate` and `kill` end a pod."""

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
        self.by_name = {c["name"]: PodContainer(c, _new(c)) for c in document["spec"]["containers"]}
        self.over = False
        """True when no container runs and none will run again."""

    @property
    def ip(self) -> str:
        return self._place.pod_ip

    def build_status(self, now: datetime) -> Object:
        state = status.PodState(
            containers=[entry.record for entry in self.by_name.values()],
            host_ip=self._place.host_ip, pod_ip=self.ip, start_time=self._start,
            failed=self._failed,
        )  # fmt: skip
        return status.build_status(self.document, state, now)

    def log_file(self, container: str, *, previous: bool = False) -> Path | None:
        """The log of the container's latest run, or of the one before it; None if there is none."""
        entry = self.by_name.get(container)
        if entry is None:
            return None
        path = self._run_folder(entry, entry.record.restarts - (1 if previous else 0)) / "log"
        return path if path.exists() else None

    def is_running(self, container: str) -> bool:
        entry = self.by_name.get(container)
        return entry is not None and entry.process is not None

    @property
    def stopped(self) -> bool:
        return self._stopping.is_set()

    def update(self, document: Object) -> None:
        """Replace the pod's object with `document`, unless the known one is newer."""
        if _version(document) >= _version(self.document):
            self.document = document

    def fail(self, reason: str, message: str) -> None:
        self._failed = status.Failed(reason=reason, message=message)

    def lose_memory(self) -> None:
        """Empty the volumes in memory, as a power loss does."""
        shutil.rmtree(self.folders.memory, ignore_errors=True)
        for volume in self.document["spec"].get("volumes") or []:
            self.folders.volume(volume).mkdir(parents=True, exist_ok=True)

    async def run(self) -> None:
        try:
            if self._admit():
                await self._prepare()
                async with asyncio.TaskGroup() as group:
                    for entry in self.by_name.values():
                        group.create_task(self._run_container(entry))
        finally:
            self.over = True
            self._host.changed(self)

    def terminate(self) -> None:
        """Begin a graceful stop: send SIGTERM to each main process, and restart nothing."""
        self._stopping.set()
        for entry in self.by_name.values():
            if entry.process:
                entry.process.terminate()

    def kill(self) -> None:
        self._stopping.set()
        for entry in self.by_name.values():
            if entry.process:
                entry.process.kill()

    def processes(self) -> list[int]:
        """The pids of all descendants of the shims, then of the shims themselves."""
        alive = [entry.process for entry in self.by_name.values() if entry.process]
        below = [pid for process in alive for pid in process.processes()]
        return [*below, *(process.shim for process in alive)]

    # --- until the containers can start ---------------------------------------------------------

    def _admit(self) -> bool:
        for entry in self.by_name.values():
            wanted = devices.count_wanted(entry.spec)
            gpus = self._host.allocate(self, entry.record.name, wanted) if wanted else ()
            if gpus is None:
                self._failed = status.Failed(
                    reason="UnexpectedAdmissionError",
                    message="Pod was rejected: Allocate failed due to requested number of devices "
                    f"unavailable for {devices.RESOURCE}. Requested: {wanted}, which is unexpected",
                )
                return False
            entry.gpus = gpus
        self._host.changed(self)
        return True

    async def _prepare(self) -> None:
        """Fetch ConfigMaps and Secrets and create the volumes.

        Retry until none is missing or the pod is stopped.
        """
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

    # --- runs of a container --------------------------------------------------------------------

    async def _run_container(self, entry: PodContainer) -> None:
        policy = self.document["spec"].get("restartPolicy", "Always")
        backoff = Backoff(rule=self._host.backoff)
        while not self._stopping.is_set():
            command = await self._command(entry)
            if command is None:
                return
            ended = await self._run_once(entry, command)
            await self._host.powered.wait()
            if not is_restarted(policy, ended.exit_code) or self._stopping.is_set():
                return
            began = ended.started_at or ended.finished_at
            backoff = backoff.after((ended.finished_at - began).total_seconds())
            await self._wait_restart(entry, backoff.delay)
            backoff = backoff.next()

    async def _command(self, entry: PodContainer) -> containers.Command | None:
        """Build the command; retry after an error. Returns None if the pod is stopped first."""
        while not self._stopping.is_set():
            try:
                return await self._build_command(entry)
            except ImageError as error:
                await self._wait_image(entry, str(error))
            except (ConfigError, ValueError) as error:
                self._wait_one(entry, "CreateContainerConfigError", str(error))
                await self._pause(_RETRY)
                await self._fetch_sources()
            except NotSimulatedError as error:
                self._wait_one(entry, "CreateContainerConfigError", str(error))
                await self._stopping.wait()
        return None

    async def _wait_image(self, entry: PodContainer, why: str) -> None:
        first = not isinstance(entry.record.state, status.Waiting) or not (
            entry.record.state.reason.startswith(("ErrImage", "ImagePull"))
        )
        if first:
            self._wait_one(entry, "ErrImagePull", why)
            self._event("Warning", "Failed", why)
            await self._pause(_RETRY)
        image = entry.spec["image"]
        self._wait_one(entry, "ImagePullBackOff", f'Back-off pulling image "{image}": {why}')
        await self._pause(2 * _RETRY)

    async def _run_once(self, entry: PodContainer, command: containers.Command) -> containers.Ended:
        folder = self._run_folder(entry, entry.record.restarts)
        process = await containers.start_container(command, folder / "spec.json", self._host.mark)
        entry.process = process
        number = f"lab://{self.uid}/{entry.record.name}/{next(self._ids)}"
        try:
            if await process.started():
                ended = await self._while_running(entry, process, number)
            else:
                ended = await process.wait()
        finally:
            entry.process = None
        self._record_end(entry, ended, number)
        return ended

    async def _while_running(
        self, entry: PodContainer, process: containers.ContainerProcess, number: str
    ) -> containers.Ended:
        assert process.started_at is not None
        running = status.Running(started_at=process.started_at)
        self._update(entry, state=running, container_id=number, started=False, ready=False)
        self._event("Normal", "Started", f"Started container {entry.record.name}")
        if self._stopping.is_set():
            process.terminate()
        async with _background(self._probe(entry, process)):
            return await process.wait()

    async def _probe(self, entry: PodContainer, process: containers.ContainerProcess) -> None:
        def unhealthy(why: str) -> None:
            self._event(
                "Warning", "Unhealthy", f"{why}; container {entry.record.name} is restarted"
            )
            process.kill()

        effects = probes.Effects(
            started=lambda: self._update(entry, started=True),
            ready=lambda good: self._update(entry, ready=good),
            unhealthy=unhealthy,
        )
        await probes.probe_container(entry.spec, self.ip, effects)

    def _record_end(self, entry: PodContainer, ended: containers.Ended, number: str) -> None:
        if not self._host.powered.is_set():
            code, reason = 255, "Unknown"  # after a reboot containerd has no exit status
        else:
            code, reason = ended.exit_code, "Completed" if ended.exit_code == 0 else "Error"
        message = ended.failed_to_start or self._message(entry, code)
        state = status.Terminated(
            exit_code=code, signal=ended.signal, message=message, container_id=number,
            reason="StartError" if ended.failed_to_start else reason,
            started_at=ended.started_at, finished_at=ended.finished_at,
        )  # fmt: skip
        self._update(entry, state=state, started=False, ready=False, container_id=number)

    async def _wait_restart(self, entry: PodContainer, delay: float) -> None:
        last = entry.record.state
        assert isinstance(last, status.Terminated)
        if delay > 0:
            where = f"container={entry.record.name} pod={self.name}_{self.namespace}({self.uid})"
            message = f"back-off {delay:g}s restarting failed {where}"
            waiting = status.Waiting(reason="CrashLoopBackOff", message=message)
            self._update(entry, state=waiting, last=last)
            self._event("Warning", "BackOff", message)
            await self._pause(delay)
        if self._stopping.is_set():
            self._update(entry, state=last)
        else:
            entry.record = replace(entry.record, last=last, restarts=entry.record.restarts + 1)

    # --- preparing a run ------------------------------------------------------------------------

    async def _build_command(self, entry: PodContainer) -> containers.Command:
        """The next run's command. Raises `ImageError`, `ConfigError` or `NotSimulatedError`."""
        image = images.load_image(self._host.images, entry.spec["image"])
        env = environment.build_env(entry.spec, self.document, self._sources, self._place)
        order = launch.Order(
            container=entry.spec, image=image, env=env, hostname=self.name, gpus=entry.gpus,
            mounts=volumes.map_mounts(self.document, entry.spec, self.folders),
            folder=self._run_folder(entry, entry.record.restarts),
            marks={procs.MARK: self._host.mark, containers.POD_MARK: self.uid},
        )  # fmt: skip
        return await asyncio.to_thread(launch.apply_order, order)

    def _run_folder(self, entry: PodContainer, restarts: int) -> Path:
        folder = self.folders.disk / "containers" / entry.record.name / str(restarts)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _message(self, entry: PodContainer, code: int) -> str:
        folder = self._run_folder(entry, entry.record.restarts)
        message = launch.read_message(folder)
        fallback = entry.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if not message and fallback and code != 0:
            return procs.tail(folder / "log", 80)[-2048:]
        return message

    # --- status and Events ----------------------------------------------------------------------

    def _wait_one(self, entry: PodContainer, reason: str, message: str) -> None:
        self._update(entry, state=status.Waiting(reason=reason, message=message))

    def _wait_all(self, reason: str, message: str) -> None:
        self._event("Warning", reason, message)
        for entry in self.by_name.values():
            self._wait_one(entry, reason, message)

    def _update(self, entry: PodContainer, **changes: Any) -> None:
        record = replace(entry.record, **changes)
        if record != entry.record:
            entry.record = record
            self._host.changed(self)

    def _event(self, kind: str, reason: str, message: str) -> None:
        self._host.event(self.document, kind, reason, message)

    async def _pause(self, seconds: float) -> None:
        """Sleep; return early if the pod is stopped."""
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
    """Run `work` while the block runs. An exception in `work` is raised when the block ends."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

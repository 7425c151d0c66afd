"""Starts and controls a lab. The command line, the tests and the demo use it."""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from everstep_lab import build, control, guardian, kubeconfig
from everstep_lab.api import Api
from everstep_lab.config import LabConfig
from everstep_lab.places import Places
from everstep_lab.seam import FaultRequest, LabError

Say = Callable[[str], None]
_DOWN_SECONDS = 45.0
_OPERATOR_SECONDS = 200.0
"""The supervisor waits up to 180 s for the operator to become ready."""


def _silent(_: str) -> None:
    pass


class Lab:
    """A lab on this machine.

    `with Lab(LabConfig(nodes=4)) as lab:` starts one. It ends with the block, or when this process
    ends for any reason. `Lab.running()` connects to the lab that `everstep-lab up` started.
    """

    def __init__(
        self, config: LabConfig | None = None, *, say: Say = _silent, lasting: bool = False
    ) -> None:
        self._config, self._say, self._lasting = config or LabConfig(), say, lasting
        self.places = Places.from_env(os.environ)
        self.described: dict[str, Any] = {}
        self._lifeline: int | None = None

    @classmethod
    def running(cls) -> "Lab":
        """Connect to the running lab. Raises LabError if none runs."""
        lab = cls()
        lab.described = lab.status()
        return lab

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    def up(self) -> None:
        """Build missing binaries and start the lab. Returns when it is usable.

        Raises:
            LabError: a lab runs already, a build failed, or the start failed (with the reason).
        """
        self._config.check()
        _check_kubeconfig(self._config.kubeconfig)
        modules = (build.CONTROL_PLANE, build.OBJECT_STORE)
        control_plane, object_store = build.ensure_all(modules, self._say)
        config = dataclasses.replace(
            self._config,
            control_plane=str(control_plane),
            object_store=str(object_store),
        )
        lock = self._take_lock()
        try:
            self._launch(config, lock)
        finally:
            os.close(lock)

    def down(self) -> str:
        """End the lab and remove its files. If a lab was killed, remove what it left.

        Returns a sentence on what was done.
        """
        if (lock := guardian.take_lock(self.places.lock)) is None:
            self._ask_down()
            self._close_lifeline()
            return "the lab is down"
        left = guardian.remove_leftovers(self.places.root, self.places.memory)
        guardian.remove(self.places.root, self.places.memory)
        os.close(lock)
        self._close_lifeline()
        return f"no lab is running; {left}"

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.ask({"do": "status"})
        return status

    def fault(self, node: str, **fields: Any) -> str:
        """Inject a fault.

        `fields` are those of `seam.FaultRequest`: gpu, xid, exporter, kill_node, partition.
        """
        request = dataclasses.asdict(FaultRequest(**fields))
        return str(self.ask({"do": "fault", "node": node, "fault": request}))

    def heal(self, node: str) -> str:
        return str(self.ask({"do": "heal", "node": node}))

    def operator_start(self) -> str:
        return str(self.ask({"do": "operator", "action": "start"}, timeout=_OPERATOR_SECONDS))

    def operator_stop(self) -> str:
        return str(self.ask({"do": "operator", "action": "stop"}))

    def operator_kill(self) -> str:
        """Send SIGKILL to the operator."""
        return str(self.ask({"do": "operator", "action": "kill"}))

    def operator_restart(self) -> str:
        return str(self.ask({"do": "operator", "action": "restart"}, timeout=_OPERATOR_SECONDS))

    def operator_logs(self) -> str:
        """The operator's output since the lab started."""
        log = Path(self.status()["operator"]["log"])
        if not log.exists():
            raise LabError("the operator was never started: run `everstep-lab operator start`")
        return log.read_text()

    def objectstore_stop(self) -> str:
        """Stop the S3 server. It refuses connections from then on; its data are kept."""
        return str(self.ask({"do": "objectstore", "action": "stop"}))

    def objectstore_start(self) -> str:
        return str(self.ask({"do": "objectstore", "action": "start"}))

    def etcd_keep(self) -> str:
        """Copy etcd's current data."""
        return str(self.ask({"do": "etcd", "action": "keep"}))

    def etcd_restore(self) -> str:
        """Restart the control plane with the copy that the last `etcd_keep` took."""
        request = {"do": "etcd", "action": "restore"}
        return str(control.ask(self.places.socket, request, timeout=240.0))

    def ask(self, request: dict[str, Any], *, timeout: float = 60.0) -> Any:
        return control.ask(self.places.socket, request, timeout=timeout)

    @property
    def nodes(self) -> list[str]:
        return list(self.status()["nodes"])

    @property
    def kubeconfig(self) -> Path:
        return self.places.kubeconfig

    @property
    def logs(self) -> Path:
        return self.places.logs

    @property
    def operator_log(self) -> Path:
        return Path(self.described["operator"]["log"])

    @property
    def operator_metrics_url(self) -> str:
        return str(self.described["operator"]["metrics"])

    @property
    def store_environment(self) -> Mapping[str, str]:
        """The AWS_… environment variables for a client of the lab's S3 server."""
        environment: dict[str, str] = self.described["objectstore"]["environment"]
        return environment

    def api(self) -> Api:
        """A client with administrator rights, for the running event loop; the caller closes it."""
        cluster, token = kubeconfig.read(self.kubeconfig)
        return Api(cluster, token=token, ca=self.places.certs / "ca.crt")

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str:
        """Run `kubectl` and return its standard output; with `check=False` also its standard error.

        Raises LabError with the standard error if it fails and `check` is set.
        """
        done = subprocess.run(
            [self.described["kubectl"], *arguments], input=stdin, text=True, timeout=timeout,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)}, capture_output=True,
            check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise LabError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout if check else done.stdout + done.stderr

    def _take_lock(self) -> int:
        lock = guardian.take_lock(self.places.lock)
        if lock is None:
            raise LabError(
                f"a lab runs already (supervisor {self._supervisor_pid()}): `everstep-lab status` "
                "shows it, `everstep-lab down` ends it"
            )
        guardian.remove_leftovers(self.places.root, self.places.memory)
        return lock

    def _supervisor_pid(self) -> str:
        try:
            return f"pid {self.status()['supervisor']}"
        except LabError:
            return "still starting, or going down"

    def _launch(self, config: LabConfig, lock: int) -> None:
        self.places.logs.mkdir(parents=True)
        self.places.memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.write(self.places.root / "config.json")
        ready, ready_end = os.pipe()
        descriptors = {"--lock": lock, "--ready": ready_end}
        if not self._lasting:
            descriptors["--lifeline"], self._lifeline = os.pipe()
        try:
            process = self._spawn_guardian(descriptors)
        finally:
            os.close(ready_end)
            if "--lifeline" in descriptors:
                os.close(descriptors["--lifeline"])
        self._await_ready(ready, process)

    def _spawn_guardian(self, descriptors: Mapping[str, int]) -> "subprocess.Popen[bytes]":
        supervisor = [part for name, fd in descriptors.items() for part in (name, str(fd))]
        passed = [part for fd in descriptors.values() for part in ("--pass-fd", str(fd))]
        with (self.places.logs / "supervisor.log").open("ab") as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "everstep_lab.guardian",
                    "--root", str(self.places.root), "--memory", str(self.places.memory),
                    "--lock", str(descriptors["--lock"]), *passed, "--", *supervisor,
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "EVERSTEP_LAB_NETWORK": str(self.places.network)},
                pass_fds=tuple(descriptors.values()),
            )  # fmt: skip

    def _await_ready(self, ready: int, process: "subprocess.Popen[bytes]") -> None:
        try:
            with os.fdopen(ready) as lines:
                for line in lines:
                    document = json.loads(line)
                    if "ready" in document:
                        self.described = document["ready"]
                        return
                    if "error" in document:
                        raise LabError(f"the lab did not start: {document['error']}")
                    self._say(document["progress"])
            raise LabError("the lab ended during its start; its log is above")
        except BaseException:
            process.send_signal(signal.SIGTERM)
            self._close_lifeline()
            process.wait(_DOWN_SECONDS)
            raise

    def _ask_down(self) -> None:
        """Request `down`, then wait for the lock: it is free once processes and files are gone."""
        try:
            self.ask({"do": "down"})
        except LabError:
            self._close_lifeline()  # The lab is starting or going down now: wait for the lock.
        end = time.monotonic() + _DOWN_SECONDS
        while (lock := guardian.take_lock(self.places.lock)) is None:
            if time.monotonic() > end:
                raise LabError(f"the lab is not down after {_DOWN_SECONDS:.0f} s; see its log")
            select.select([], [], [], 0.05)
        guardian.remove(self.places.root, self.places.memory)
        os.close(lock)

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def _check_kubeconfig(path: str) -> None:
    if path and Path(path).exists() and not kubeconfig.is_ours(Path(path)):
        raise LabError(
            f"--kubeconfig {path} exists and was not written by a lab: choose another file"
        )
    if path and not Path(path).parent.is_dir():
        raise LabError(f"--kubeconfig {path}: the folder does not exist")

"""The process that owns the whole lab: control plane, object store, operator, simulated nodes.

It reports its progress on the ready pipe and answers the command line on a unix socket. It stops
the lab in order at SIGTERM, at `down`, or when its lifeline closes. The lifeline is a pipe from the
process that started the lab; it exists only if the lab must end with that process.
"""

import argparse
import asyncio
import dataclasses
import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from everstep_lab import certs, control, guardian, kubeconfig, procs
from everstep_lab.api import Api, ApiError, Object
from everstep_lab.config import LabConfig
from everstep_lab.controlplane import ControlPlane, Tokens
from everstep_lab.node import objects
from everstep_lab.nodeset import NodeSet
from everstep_lab.objectstore import ObjectStore
from everstep_lab.operator import Operator
from everstep_lab.places import Places, choose_port
from everstep_lab.ready import ReadyPipe
from everstep_lab.seam import FaultRequest, LabError

SECRET = "object-store"
_UP_SECONDS = 300.0
_DAEMONSETS = f"/apis/apps/v1/namespaces/{objects.EXPORTER_NAMESPACE}/daemonsets"


class Supervisor:
    def __init__(self, places: Places, config: LabConfig, ready: ReadyPipe) -> None:
        self._places, self._config, self._ready = places, config, ready
        self._begun = time.monotonic()
        self._stop = asyncio.Event()
        self._tokens = Tokens.draw(f"node-{i + 1}" for i in range(config.nodes))
        self._nodes = NodeSet(places, config, self._tokens)
        places.certs.mkdir()
        self._authority = certs.Authority(places.certs, datetime.datetime.now(datetime.UTC))  # noqa: TID251
        binaries = Path(config.control_plane)
        self._control = ControlPlane(
            binaries, places, tokens=self._tokens, authority=self._authority,
            node_grace_seconds=config.node_grace_seconds,
        )  # fmt: skip
        port = choose_port(places.store_ip, 9000)
        self._store = ObjectStore(
            Path(config.object_store) / "minio", places.root / "objectstore",
            ip=places.store_ip, port=port, log=places.logs / "objectstore.log",
        )  # fmt: skip
        self._operator = Operator(
            places,
            binaries / "kubectl",
            url=self._control.url,
            ca=self._control.ca,
            args=config.operator_args,
        )
        self._api = Api(self._control.url, token=self._tokens.admin, ca=self._control.ca)

    async def run(self) -> None:
        """Start, then run until a stop is requested or a part of the lab fails."""
        try:
            await self._unless_stopped(self._up())
            server = await control.serve(self._places.socket, self.answer)
            self._ready.say_ready(self.describe())
            async with server:
                await self._live()
        finally:
            await self._down()

    def request_stop(self) -> None:
        self._stop.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait(
            {task, stopped}, timeout=_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        stopped.cancel()
        if task.done():
            return await task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self._stop.is_set():
            raise LabError("a stop was requested during the start")
        raise LabError(f"not up after {_UP_SECONDS:.0f} s: is the machine overloaded?")

    async def _up(self) -> None:
        self._store.start()
        self._ready.say("starting etcd and kube-apiserver")
        await self._control.start()
        self._write_kubeconfigs()
        await self._create_exporters()
        self._ready.say(f"starting {self._config.nodes} nodes")
        self._nodes.start(self._control, self._authority)
        await self._until_usable()
        await self._create_secret()
        if self._config.operator:
            self._ready.say("installing CRDs and RBAC, starting the operator")
            await self._operator.start(self._api)

    def _write_kubeconfigs(self) -> None:
        ca = self._control.ca.read_bytes()
        document = kubeconfig.build(self._control.url, ca, self._tokens.admin, "admin")
        kubeconfig.write_private(self._places.kubeconfig, document)
        if self._config.kubeconfig:
            kubeconfig.write_private(Path(self._config.kubeconfig), document)

    async def _until_usable(self) -> None:
        """Wait until the lab is usable.

        Creating a pod needs the ServiceAccount, and binding it needs a Ready node. Health checks
        need the exporters.
        """
        while not (
            await self._has_account()
            and await self._are_nodes_ready()
            and await self._are_exporters_ready()
        ):
            self._check()
            await asyncio.sleep(0.1)
        while not self._store.is_ready():
            self._check()
            await asyncio.sleep(0.1)

    async def _has_account(self) -> bool:
        try:
            await self._api.get("/api/v1/namespaces/default/serviceaccounts/default")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _are_nodes_ready(self) -> bool:
        nodes = await self._api.list("/api/v1/nodes")
        return sum(map(is_node_ready, nodes)) == self._config.nodes

    async def _create_exporters(self) -> None:
        """Create the exporters' DaemonSet. Retry until its namespace exists.

        The API server creates that namespace shortly after it is ready.
        """
        while True:
            try:
                await self._api.create(_DAEMONSETS, objects.build_exporters())
                return
            except ApiError as error:
                if error.status != 404:
                    raise
            self._check()
            await asyncio.sleep(0.1)

    async def _are_exporters_ready(self) -> bool:
        found = await self._api.get(f"{_DAEMONSETS}/{objects.EXPORTER}")
        ready = (found.get("status") or {}).get("numberReady", 0)
        return bool(ready >= self._config.nodes)

    async def _create_secret(self) -> None:
        body: Object = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": SECRET},
            "stringData": self._store.environment(),
        }
        await self._api.create("/api/v1/namespaces/default/secrets", body)

    async def _live(self) -> None:
        while not self._stop.is_set():
            self._check()
            try:
                async with asyncio.timeout(0.5):
                    await self._stop.wait()
            except TimeoutError:
                continue

    def _check(self) -> None:
        """Raise LabError if a part ended unexpectedly: the lab must not continue without it."""
        self._control.check()
        self._store.check()
        self._nodes.check()

    async def _down(self) -> None:
        self._operator.stop()
        await self._nodes.stop()
        await self._api.close()
        self._store.stop()
        self._control.stop()

    async def answer(self, request: dict[str, Any]) -> Any:
        """Answer one request from the command line. Raises LabError to refuse it."""
        match request:
            case {"do": "status"}:
                return self.describe()
            case {"do": "down"}:
                self.request_stop()
                return "going down"
            case {"do": "fault", "node": str(name), "fault": dict(fields)}:
                return await self._nodes.get(name).fault(FaultRequest(**fields))
            case {"do": "heal", "node": str(name)}:
                return await self._nodes.get(name).heal()
            case {"do": "operator", "action": str(action)}:
                return await self._operate(action)
            case {"do": "objectstore", "action": str(action)}:
                return await self._store_action(action)
            case {"do": "etcd", "action": str(action)}:
                return await self._etcd_action(action)
        raise LabError(f"unknown request to the lab: {request}")

    async def _operate(self, action: str) -> str:
        if action == "kill":
            return f"operator {self._operator.kill()} killed"
        if action in ("stop", "restart"):
            self._operator.stop()
        if action in ("start", "restart"):
            await self._operator.start(self._api)
            return f"operator runs as {self._operator.pid}"
        return "operator stopped"

    async def _store_action(self, action: str) -> str:
        if action == "stop":
            self._store.stop(kill=True)
            return "object store stopped; its data are kept"
        self._store.start()
        while not self._store.is_ready():
            self._store.check()
            await asyncio.sleep(0.05)
        return f"object store serves {self._store.endpoint}"

    async def _etcd_action(self, action: str) -> str:
        if action == "keep":
            self._control.keep_etcd()
            return "copied etcd's data"
        await self._control.restore_etcd()
        return "etcd was restored from the copy"

    def describe(self) -> dict[str, Any]:
        """The lab's state for `everstep-lab status`, as JSON values."""
        guardian = os.getppid()
        return {
            "supervisor": os.getpid(),
            "guardian": guardian,
            "api": self._control.url,
            "kubeconfig": self._config.kubeconfig or str(self._places.kubeconfig),
            "kubectl": str(Path(self._config.control_plane) / "kubectl"),
            "logs": str(self._places.logs),
            "up_seconds": round(time.monotonic() - self._begun, 1),
            "memory_bytes": procs.memory_bytes([guardian, *procs.descendants(guardian)]),
            "control_plane": self._control.pids(),
            "objectstore": {
                "pid": self._store.pid,
                "endpoint": self._store.endpoint,
                "bucket": self._store.bucket,
                "environment": self._store.environment(),
            },
            "operator": {
                "pid": self._operator.pid,
                "ended": self._operator.ended,
                "metrics": self._operator.metrics_url,
                "log": str(self._operator.log),
                "kubeconfig": str(self._operator.kubeconfig),
            },
            "nodes": self._nodes.describe(),
            "config": dataclasses.asdict(self._config),
        }


def is_node_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def _main(places: Places, ready: ReadyPipe, lifeline: int | None) -> int:
    config = LabConfig.read(places.root / "config.json")
    supervisor = Supervisor(places, config, ready)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, supervisor.request_stop)
    if lifeline is not None:
        loop.add_reader(lifeline, lambda: _hung_up(loop, lifeline, supervisor))
    running = asyncio.create_task(supervisor.run())
    try:
        await running
    except LabError as error:
        print(f"everstep-lab: {error}", file=sys.stderr)
        return guardian.TOLD if ready.say_error(str(error)) else guardian.BROKE_DOWN
    except Exception as error:
        traceback.print_exc()
        told = ready.say_error(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        return guardian.TOLD if told else guardian.BROKE_DOWN
    return 0


def _hung_up(loop: asyncio.AbstractEventLoop, lifeline: int, supervisor: Supervisor) -> None:
    if not os.read(lifeline, 1):
        loop.remove_reader(lifeline)
        supervisor.request_stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="everstep_lab.supervisor")
    parser.add_argument("--lock", type=int, required=True)
    parser.add_argument("--ready", type=int, required=True)
    parser.add_argument("--lifeline", type=int)
    arguments = parser.parse_args()
    # The supervisor holds the lock until it ends. A child must not inherit it and hold it longer.
    for descriptor in (arguments.lock, arguments.ready, arguments.lifeline):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    procs.prefer(os.getpid())
    places = Places.from_env(os.environ)
    return asyncio.run(_main(places, ReadyPipe(arguments.ready), arguments.lifeline))


if __name__ == "__main__":
    sys.exit(main())

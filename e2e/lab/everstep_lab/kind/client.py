"""`KindLab`: the lab on a kind cluster, with the methods of `Lab`."""

import dataclasses
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from everstep_lab import build, kubeconfig
from everstep_lab.api import Api
from everstep_lab.config import KIND_GRACE_SECONDS, KIND_NODES, LabConfig
from everstep_lab.kind import cluster, images, manifests, nodes, operator, places, store, tools
from everstep_lab.kind.archive import Archive
from everstep_lab.objectstore import BUCKET, REGION
from everstep_lab.places import choose_port
from everstep_lab.seam import FaultRequest, LabError

Say = Callable[[str], None]
KIND_DEFAULT = LabConfig(nodes=KIND_NODES, node_grace_seconds=KIND_GRACE_SECONDS)


def _silent(_: str) -> None:
    pass


class KindLab:
    """A kind cluster with simulated GPUs. Implements `seam.RunningLab`.

    `with KindLab(LabConfig(nodes=3)) as lab:` creates one and deletes it after the block.
    `KindLab.running()` connects to the one that `everstep-lab up --kind` created. Its methods
    accept kind's node names (`everstep-worker`, `everstep-worker2`) and those of the local lab
    (`node-1`, `node-2`).
    """

    freezes_nodes = True
    """A node can be frozen with all its processes."""

    def __init__(
        self, config: LabConfig | None = None, *, say: Say = _silent, operator: bool | None = None
    ) -> None:
        self._config, self._say = config or KIND_DEFAULT, say
        if operator is not None:
            self._config = dataclasses.replace(self._config, operator=operator)
        self.places = places.KindPlaces.from_env(os.environ)
        self.described: dict[str, Any] = {}

    @classmethod
    def running(cls) -> "KindLab":
        """Connect to the running lab. Raises LabError if none runs."""
        lab = cls()
        lab._load()
        return lab

    @classmethod
    def exists(cls) -> bool:
        return places.KindPlaces.from_env(os.environ).described.exists()

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

    # --- create and delete ----------------------------------------------------------------------

    def up(self) -> None:
        """Build missing images and create the cluster. Returns when it is usable.

        Raises:
            LabError: docker or kind is missing, a kind lab runs already, or a step failed.
        """
        begun = time.monotonic()
        self._config.check()
        tools.check_engine()
        self._refuse_second()
        archives = self._archives(images.ensure_images(self._say))
        try:
            self._describe()
            cluster.create(
                self.places, self._config, self.described["store_port"], archives, self._say
            )
            self._fill()
        except BaseException:
            self._say("the kind lab did not start; deleting its cluster")
            self._delete()
            raise
        self.described["up_seconds"] = round(time.monotonic() - begun, 1)
        self._store()
        if self._config.operator:
            self._say("installing the chart with Helm")
            self.operator_start()

    def down(self) -> str:
        """Delete the cluster, its volumes and files, including those of an interrupted `up`."""
        there = self.places.cluster in tools.list_clusters()
        self._delete()
        return (
            "the kind lab is down"
            if there
            else "no kind lab is running; there was nothing to remove"
        )

    def _refuse_second(self) -> None:
        if self.places.cluster in tools.list_clusters():
            raise LabError(
                f"the kind cluster {self.places.cluster!r} exists already: `everstep-lab status` "
                "shows it, `everstep-lab down` deletes it"
            )
        shutil.rmtree(self.places.root, ignore_errors=True)
        self.places.root.mkdir(mode=0o700, parents=True)

    def _describe(self) -> None:
        port = choose_port("127.0.0.1", places.STORE_NODE_PORT)
        self.described = {
            "cluster": self.places.cluster,
            "kubectl": tools.find_kubectl(),
            "kubeconfig": self._config.kubeconfig or str(self.places.kubeconfig),
            "store_port": port,
            "access_key": "everstep-lab",
            "secret_key": secrets.token_hex(16),
            "config": dataclasses.asdict(self._config),
        }

    def _archives(self, built: Sequence[images.Image]) -> list[Archive]:
        """One archive for the workers, one for the control plane's node with the object store.

        Each node therefore loads only the images that it runs.
        """
        root = self.places.root
        parts = {"workers": self._workers(), "store": [self.places.control_plane]}
        return [
            Archive(root / f"{part}.tar", [t for i in built if i.part == part for t in i.tags], to)
            for part, to in parts.items()
            if to
        ]

    def _fill(self) -> None:
        self._say("starting the nodes' GPUs and the object store")
        workers, control = self._workers(), self.places.control_plane
        data = f"{places.NODE_FOLDER}/store/objects/{BUCKET}"
        tools.docker("exec", control, "mkdir", "-p", data)
        objects = manifests.build_objects(
            gpus=self._config.gpus_per_node, seed=self._config.seed, data_node=control,
            store=self._store_environment("cluster"),
        )  # fmt: skip
        kubectl = [self.described["kubectl"], "--kubeconfig", cluster.own_kubeconfig(self.places)]
        apply = [*kubectl, "apply", "-f", "-"]
        tools.run(apply, stdin=json.dumps(_as_list(objects)), timeout=60)
        files = {str(self.places.kubeconfig), self.described["kubeconfig"]}
        cluster.write_kubeconfig(self.places, kubectl, files)
        self._wait_account("default")
        self.share_store("default")
        for node in workers:
            nodes.wait_for(partial(_is_registered, node), f"the GPUs of {node}", 120.0)
        nodes.wait_for(self._are_gpus_allocatable, "the GPUs to become allocatable", 60.0)
        wait = ["rollout", "status", f"deployment/{places.STORE}", "--timeout=90s"]
        self.kubectl("-n", places.NAMESPACE, *wait, timeout=100)

    def _wait_account(self, namespace: str) -> None:
        def there() -> bool:
            found = self.kubectl("-n", namespace, "get", "sa", "default", check=False)
            return "NotFound" not in found

        nodes.wait_for(there, f"the ServiceAccount default of {namespace}", 60.0)

    def _are_gpus_allocatable(self) -> bool:
        form = "-o=jsonpath={.items[*].status.allocatable.nvidia\\.com/gpu}"
        offered = self.kubectl("get", "nodes", form).split()
        wanted = [str(self._config.gpus_per_node)] * self._config.nodes
        return offered == wanted or not self._config.gpus_per_node

    def _delete(self) -> None:
        extra = self._config.kubeconfig or self._saved().get("config", {}).get("kubeconfig", "")
        cluster.delete(self.places, extra)

    # --- faults ---------------------------------------------------------------------------------

    def fault(self, node: str, **fields: Any) -> str:
        """Inject a fault.

        `fields` are those of `seam.FaultRequest`: gpu, xid, exporter, kill_node, partition,
        freeze_node.
        """
        name, request = self._node(node), FaultRequest(**fields)
        said = []
        if request.xid is not None or request.exporter is not None or not request.asks_for_node:
            said.append(str(nodes.ask(name, "fault", dataclasses.asdict(request))))
        if request.partition:
            said.append(f"{name}: {nodes.cut_off(name, self.places.control_plane)}")
        if request.kill_node:
            said.append(f"{name}: {nodes.lose_power(name)}")
        elif request.freeze_node:
            said.append(f"{name}: {nodes.freeze(name)}")
        return "\n".join(said)

    def heal(self, node: str) -> str:
        """Undo every fault of this node. Reloading a GPU's driver ends the processes on it."""
        name, control = self._node(node), self.places.control_plane
        said = [back] if (back := nodes.regain(name)) else []
        if nodes.is_cut_off(name, control):
            said.append(nodes.reconnect(name, control))
        said.append(str(nodes.ask(name, "heal", {})).removeprefix(f"{name}: "))
        found = [text for text in said if text != "nothing to heal"] or ["nothing to heal"]
        return f"{name}: " + "; ".join(found)

    def api_server_stop(self) -> str:
        """Stop the API server; nodes and pods continue. Only the kind lab has this method."""
        return nodes.stop_api_server(self.places.control_plane)

    def api_server_start(self) -> str:
        return nodes.start_api_server(self.places.control_plane)

    def objectstore_stop(self) -> str:
        """Stop the S3 server. Its data are kept."""
        return store.stop(self)

    def objectstore_hang(self) -> str:
        """Make the S3 server answer no requests. Only the kind lab has this method."""
        return store.hang(self.places.control_plane)

    def objectstore_refuse(self) -> str:
        """Make the S3 server refuse its clients' keys. Only the kind lab has this method."""
        return store.refuse(self)

    def objectstore_start(self) -> str:
        """Start the S3 server, or undo `objectstore_hang` or `objectstore_refuse`."""
        store.start(self, self.places.control_plane, self.described["secret_key"])
        return f"object store serves {self.store_environment['AWS_ENDPOINT_URL']}"

    # --- the operator ---------------------------------------------------------------------------

    def operator_start(self) -> str:
        """Install the chart, or scale it up again after `operator_stop`."""
        return operator.start(self, self._config.operator_args)

    def operator_stop(self) -> str:
        return operator.stop(self)

    def operator_kill(self) -> str:
        """Kill the leader: delete its pod with a grace period of 0."""
        return operator.kill(self)

    def operator_restart(self) -> str:
        return operator.restart(self)

    def operator_logs(self) -> str:
        """The logs of all replicas. Each line begins with the name of its pod."""
        return operator.logs(self)

    @property
    def follow_operator(self) -> list[str]:
        """The arguments with which `kubectl` follows the operator's log."""
        return operator.build_logs(follow=True)

    def helm(self, *arguments: str, check: bool = True, timeout: float = 300.0) -> str:
        """Run `helm` and return its standard output; with `check=False` also its standard error.

        Raises LabError with the end of its output if it fails and `check` is set.
        """
        binary = str(build.ensure_helm(self._say))
        done = tools.run(
            [binary, *arguments], env=self._environment(), timeout=timeout, check=check
        )
        return done.stdout if check else done.stdout + done.stderr

    # --- state and clients ----------------------------------------------------------------------

    @property
    def nodes(self) -> Sequence[str]:
        """Names of the GPU nodes."""
        return self._workers()

    def status(self) -> dict[str, Any]:
        self._load()
        return {
            **self.described,
            "nodes": {
                name: nodes.describe(name, self.places.control_plane) for name in self._workers()
            },
            "objectstore": {"environment": dict(self.store_environment), "bucket": BUCKET},
            "operator": operator.describe(self),
        }

    @property
    def kubeconfig(self) -> Path:
        return self.places.kubeconfig

    @property
    def store_environment(self) -> Mapping[str, str]:
        """The AWS_… variables for an S3 client on this host. Pods use the Secret `object-store`."""
        return self._store_environment("host")

    @property
    def pods_store_environment(self) -> Mapping[str, str]:
        return self._store_environment("cluster")

    def share_store(self, namespace: str) -> None:
        """Create the Secret `object-store` in a namespace."""
        secret = manifests.build_store_secret(self.pods_store_environment, namespace)
        self.kubectl("apply", "-f", "-", stdin=json.dumps(secret))

    def api(self) -> Api:
        """A client with administrator rights, for the running event loop. The caller closes it."""
        server, token = kubeconfig.read(self.kubeconfig)
        return Api(server, token=token, ca=self.places.ca)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str:
        """Run `kubectl` and return its standard output; with `check=False` also its standard error.

        Raises LabError with the end of its output if it fails and `check` is set.
        """
        done = tools.run(
            [self.described["kubectl"], *arguments], stdin=stdin, check=check, timeout=timeout,
            env=self._environment(),
        )  # fmt: skip
        return done.stdout if check else done.stdout + done.stderr

    def load_image(self, *tags: str) -> None:
        """Load images from the docker engine into every node of the cluster."""
        argv = [tools.find("kind"), "load", "docker-image", *tags, "--name", self.places.cluster]
        tools.run(argv, timeout=300)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def _store_environment(self, seen_from: str) -> dict[str, str]:
        host = f"{places.STORE}.{places.NAMESPACE}.svc.cluster.local:{places.STORE_PORT}"
        if seen_from == "host":
            host = f"127.0.0.1:{self.described['store_port']}"
        return {
            "AWS_ACCESS_KEY_ID": self.described["access_key"],
            "AWS_SECRET_ACCESS_KEY": self.described["secret_key"],
            "AWS_ENDPOINT_URL": f"http://{host}",
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def _workers(self) -> list[str]:
        return [self.places.worker(index) for index in range(1, self._config.nodes + 1)]

    def _node(self, name: str) -> str:
        self._load()
        found = places.choose_node(self.places, self._config.nodes, name)
        if found is None:
            raise LabError(f"no node {name!r}; there are: {', '.join(self._workers())}")
        return found

    def _load(self) -> None:
        """Read the description that `up` saved. Raises LabError if there is none."""
        saved = self._saved()
        if not saved:
            raise LabError("no kind lab is running: `everstep-lab up --kind` starts one")
        if not self.described:
            self.described = saved
            fields = {**saved["config"], "operator_args": tuple(saved["config"]["operator_args"])}
            self._config = LabConfig(**fields)

    def _saved(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(self.places.described.read_text())
        except (OSError, ValueError):
            return {}
        return document

    def _store(self) -> None:
        kubeconfig.write_private(self.places.described, json.dumps(self.described, indent=1))


def _as_list(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(objects)}


def _is_registered(node: str) -> bool:
    try:
        return bool(nodes.ask(node, "status", timeout=5)["registered"])
    except (LabError, ValueError):
        return False

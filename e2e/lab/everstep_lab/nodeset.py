"""The simulated nodes of one lab: one task per node, in the supervisor's event loop."""

import asyncio
from pathlib import Path
from typing import Any

from everstep_lab.certs import Authority
from everstep_lab.config import LabConfig
from everstep_lab.controlplane import ControlPlane, Tokens
from everstep_lab.node import SimulatedNode
from everstep_lab.places import Places
from everstep_lab.scenario import Scenario
from everstep_lab.seam import Cluster, LabError, Node, NodeSpec

_IMAGES = Path(__file__).resolve().parent.parent / "images.yaml"
_STOP_SECONDS = 15.0


class NodeSet:
    def __init__(self, places: Places, config: LabConfig, tokens: Tokens) -> None:
        self._places, self._config, self._tokens = places, config, tokens
        self._nodes: dict[str, Node] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, control: ControlPlane, authority: Authority) -> None:
        cluster = self._cluster(control)
        scenario = Scenario(seed=self._config.seed)
        for index, (name, token) in enumerate(self._tokens.nodes.items(), start=1):
            spec = NodeSpec(
                index=index,
                name=name,
                ip=self._places.node_ip(index),
                pod_prefix=self._places.pod_prefix(index),
                gpus=self._config.gpus_per_node,
                token=token,
            )
            authority.issue(name, f"system:node:{name}", [spec.ip, name])
            node: Node = SimulatedNode(spec, cluster, scenario)
            self._nodes[name] = node
            self._tasks.append(asyncio.create_task(node.run(), name=name))

    def check(self) -> None:
        """Raise LabError if a node's task failed."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise LabError(f"{task.get_name()} failed: {error!r}") from error

    async def stop(self) -> None:
        """Stop all nodes. The guardian kills the processes of nodes that do not end in time."""
        stops = [asyncio.create_task(node.stop()) for node in self._nodes.values()]
        if stops:
            await asyncio.wait(stops, timeout=_STOP_SECONDS)
        for task in [*stops, *self._tasks]:
            task.cancel()
        await asyncio.gather(*stops, *self._tasks, return_exceptions=True)

    def get(self, name: str) -> Node:
        node = self._nodes.get(name)
        if node is None:
            names = ", ".join(self._nodes) or "none"
            raise LabError(f"no node {name!r}; there are: {names}")
        return node

    def describe(self) -> dict[str, Any]:
        return {name: node.describe() for name, node in self._nodes.items()}

    def _cluster(self, control: ControlPlane) -> Cluster:
        memory = self._places.memory / "nodes"
        for folder in (memory, self._places.nodes):
            folder.mkdir(parents=True, exist_ok=True)
        return Cluster(
            api_url=control.url,
            ca_file=control.ca,
            admin_token=self._tokens.admin,
            certs=self._places.certs,
            state=self._places.nodes,
            memory=memory,
            images=Path(self._config.images) if self._config.images else _IMAGES,
            logs=self._places.logs,
            seed=self._config.seed,
        )

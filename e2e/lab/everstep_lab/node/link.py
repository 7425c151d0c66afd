"""The node's connection to the API server: all requests and watches. A partition cuts it.

A partition loses no state: the node sends levels (a lease, a node status, pod statuses). After the
partition it sends the current ones again. Events created meanwhile wait in a queue; when it
is full, further ones are dropped.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Any, Protocol

from everstep_lab.api import STRATEGIC, Api, ApiError, UnreachableError
from everstep_lab.node import objects
from everstep_lab.node.clock import micro_stamp, utc_now
from everstep_lab.seam import Cluster, NodeSpec

Object = dict[str, Any]
LEASE_EVERY = 1.0
"""Seconds between renewals. A kubelet's 10 s are too long for a grace period of a few seconds."""
STATUS_EVERY = 5.0
_RETRY = 0.3
_FORBIDDEN_TRIES = 20
log = logging.getLogger(__name__)


class Reported(Protocol):
    """A pod whose status is reported."""

    uid: str
    name: str
    namespace: str
    over: bool
    document: Object

    def build_status(self, now: datetime) -> Object: ...
    def update(self, document: Object) -> None: ...


class Link:
    """`connect` and `disconnect` may be called at any time. `failed` receives a fatal error."""

    def __init__(
        self,
        spec: NodeSpec,
        cluster: Cluster,
        *,
        node_status: Callable[[datetime], Object],
        pods: Callable[[], Iterable[Reported]],
        seen: Callable[[str, Object], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`seen` is called with LISTED and a list, or with ADDED, MODIFIED or DELETED and a pod."""
        self._spec = spec
        self._api = Api(cluster.api_url, token=spec.token, ca=cluster.ca_file)
        self._node_status = node_status
        self._pods = pods
        self._seen = seen
        self._failed = failed
        self._up = asyncio.Event()
        self._node_dirty = asyncio.Event()
        self._pods_dirty = asyncio.Event()
        self._dirty: set[str] = set()
        self._events: asyncio.Queue[Object] = asyncio.Queue(maxsize=500)
        self._task: asyncio.Task[None] | None = None
        self.registered = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._task is not None

    def connect(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"link {self._spec.name}")

    async def disconnect(self) -> None:
        """Close the connection: from then on nothing is sent to the API server."""
        task, self._task = self._task, None
        self._up.clear()
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._api.close()

    def node_changed(self) -> None:
        self._node_dirty.set()

    def pod_changed(self, uid: str) -> None:
        self._dirty.add(uid)
        self._pods_dirty.set()

    def event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._events.put_nowait(
                objects.build_event(
                    self._spec.name, pod, kind=kind, reason=reason, message=message, now=utc_now()
                )
            )

    async def fetch(self, kind: str, namespace: str, name: str) -> Object | None:
        """Fetch a ConfigMap or Secret. Waits while disconnected or without an answer.

        Returns None if it does not exist, or if the API server has forbidden it 20 times.
        """
        path = f"/api/v1/namespaces/{namespace}/{kind.lower()}s/{name}"
        forbidden = 0
        while forbidden < _FORBIDDEN_TRIES:
            await self._up.wait()
            try:
                return await self._api.get(path)
            except ApiError as error:
                if error.status == 404:
                    return None
                # The node authorizer sees a new pod's references later than the node: retry.
                if error.status not in (403, 429) and error.status < 500:
                    raise
                forbidden += error.status == 403
            except UnreachableError as error:
                log.debug("%s: fetch %s: %s", self._spec.name, path, error)
            await asyncio.sleep(_RETRY)
        return None

    async def delete(self, pod: Object) -> None:
        """Delete the pod's object, as a kubelet does after all containers have ended."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        with contextlib.suppress(ApiError):  # 409: another pod has this name
            await self._api.delete(path, grace=0, uid=meta["uid"])

    # --- while connected ------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            uid = await self._patient(self._register)
            self._up.set()
            self.registered.set()
            self._dirty |= {pod.uid for pod in self._pods()}
            async with asyncio.TaskGroup() as group:
                for work in (
                    self._renew(uid), self._report_node(), self._report_pods(),
                    self._watch(), self._send_events(),
                ):  # fmt: skip
                    group.create_task(work)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failed(error)

    async def _patient(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Retry until `call` succeeds. Log an error only if it differs from the one logged last."""
        told = ""
        while True:
            try:
                return await call()
            except (ApiError, UnreachableError) as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("%s: %s", self._spec.name, told)
                await asyncio.sleep(_RETRY)

    async def _register(self) -> str:
        node = objects.build_node(self._spec)
        node = await self._create("/api/v1/nodes", node)
        uid = str(node["metadata"]["uid"])
        await self._patch_node()
        await self._create(objects.LEASES, objects.build_lease(self._spec, uid, utc_now()))
        return uid

    async def _create(self, path: str, body: Object) -> Object:
        """Create the object, or fetch the existing one."""
        try:
            return await self._api.create(path, body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            return await self._api.get(f"{path}/{body['metadata']['name']}")

    async def _renew(self, uid: str) -> None:
        path = f"{objects.LEASES}/{self._spec.name}"

        async def once() -> None:
            await self._api.patch(path, {"spec": {"renewTime": micro_stamp(utc_now())}})

        while True:
            await self._patient(once)
            await asyncio.sleep(LEASE_EVERY)

    async def _report_node(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_EVERY):
                    await self._node_dirty.wait()
            self._node_dirty.clear()
            await self._patient(self._patch_node)

    async def _patch_node(self) -> None:
        path = f"/api/v1/nodes/{self._spec.name}/status"
        await self._api.patch(path, self._node_status(utc_now()), kind=STRATEGIC)

    async def _report_pods(self) -> None:
        while True:
            known = {pod.uid: pod for pod in self._pods()}
            dirty, self._dirty = self._dirty, set()
            self._pods_dirty.clear()
            results = await asyncio.gather(
                *(self._report_pod(known[uid]) for uid in dirty if uid in known)
            )
            if not all(results):
                await asyncio.sleep(_RETRY)
                continue
            if not self._dirty:
                await self._pods_dirty.wait()

    async def _report_pod(self, pod: Reported) -> bool:
        """Send the pod's status. Returns False if that must be retried."""
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/status"
        body = {"metadata": {"uid": pod.uid}, "status": pod.build_status(utc_now())}
        try:
            pod.update(await self._api.patch(path, body))
            if pod.over and pod.document["metadata"].get("deletionTimestamp"):
                await self.delete(pod.document)
        except ApiError as error:
            if error.status not in (404, 409):
                log.warning("%s: status of pod %s: %s", self._spec.name, pod.name, error)
                self._dirty.add(pod.uid)
                return False
        except UnreachableError:
            self._dirty.add(pod.uid)
            return False
        return True

    async def _watch(self) -> None:
        params = {"fieldSelector": f"spec.nodeName={self._spec.name}"}
        async for event in self._api.follow("/api/v1/pods", **params):
            self._seen(event.type, event.object)

    async def _send_events(self) -> None:
        while True:
            event = await self._events.get()
            path = f"/api/v1/namespaces/{event['metadata']['namespace']}/events"
            try:
                await self._api.create(path, event)
            except (ApiError, UnreachableError) as error:
                log.debug("%s: event not sent: %s", self._spec.name, error)

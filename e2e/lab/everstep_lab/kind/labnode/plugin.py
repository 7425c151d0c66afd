"""The device plugin: it reports the GPUs to the kubelet and allocates them to containers.

https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]

from everstep_lab.exporter.gpu import Gpu
from everstep_lab.kind.labnode import wire
from everstep_lab.node.devices import RESOURCE

ENDPOINT = "everstep-lab.sock"
_KUBELET = "kubelet.sock"
_LOOK = 1.0

log = logging.getLogger("labnode.plugin")


class DevicePlugin:
    """`gpus` returns the devices. `changed` sends them to the kubelet again.

    Every container with a GPU gets `mounts`, as it gets the driver's libraries on a real node.
    """

    def __init__(
        self, folder: Path, *, gpus: Callable[[], Sequence[Gpu]], mounts: Sequence[wire.Mount] = ()
    ) -> None:
        self._folder, self._gpus, self._mounts = folder, gpus, tuple(mounts)
        self._version = 0
        self._news = asyncio.Condition()
        self.registered = asyncio.Event()

    async def changed(self) -> None:
        async with self._news:
            self._version += 1
            self._news.notify_all()

    async def run(self) -> None:
        """Serve and register until cancelled. Register again after each restart of the kubelet.

        A starting kubelet removes the sockets of all plugins, which shows that it restarted.
        """
        while True:
            server = await self._serve()
            try:
                await self._register()
                await self._until_forgotten()
            finally:
                self.registered.clear()
                await server.stop(0.2)

    async def _serve(self) -> Any:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / ENDPOINT).unlink()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self._handlers(),))
        server.add_insecure_port(f"unix://{self._folder / ENDPOINT}")
        await server.start()
        return server

    def _handlers(self) -> Any:
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            wire.DEVICE_PLUGIN,
            {
                "GetDevicePluginOptions": unary(_answer_empty),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list_and_watch),
                "Allocate": unary(self._allocate),
                "PreStartContainer": unary(_answer_empty),
            },
        )

    async def _register(self) -> None:
        request = wire.build_register(ENDPOINT, RESOURCE)
        while not self.registered.is_set():
            try:
                async with grpc.aio.insecure_channel(
                    f"unix://{self._folder / _KUBELET}"
                ) as channel:
                    await channel.unary_unary(wire.REGISTER)(request, timeout=5)
                self.registered.set()
                log.info("registered %s for %d GPUs", RESOURCE, len(self._gpus()))
            except grpc.aio.AioRpcError as error:
                log.info("registration with the kubelet failed, trying again: %s", error.details())
                await asyncio.sleep(_LOOK)

    async def _until_forgotten(self) -> None:
        while (self._folder / ENDPOINT).exists():  # noqa: ASYNC110 the kubelet sets no event of ours
            await asyncio.sleep(_LOOK)
        log.info("the kubelet restarted")

    async def _list_and_watch(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        said: bytes | None = None
        while True:
            version = self._version
            devices = wire.build_devices((gpu.uuid, gpu.device_healthy) for gpu in self._gpus())
            if devices != said:
                said = devices
                yield devices
            async with self._news:
                while self._version == version:
                    await self._news.wait()

    async def _allocate(self, request: bytes, context: object) -> bytes:
        wanted = wire.read_allocate_request(request)
        log.info("allocated %s", wanted)
        return wire.build_allocation((build_env(ids), self._mounts) for ids in wanted)


def build_env(devices: Sequence[str]) -> Mapping[str, str]:
    """The variable that NVIDIA's plugin sets. It also identifies the processes that hold a GPU."""
    return {"NVIDIA_VISIBLE_DEVICES": ",".join(devices)}


async def _answer_empty(request: bytes, context: object) -> bytes:
    return wire.EMPTY

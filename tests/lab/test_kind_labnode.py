"""The device plugin over real gRPC with a stand-in for the kubelet. The rest is tested on plain values."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from everstep_contract.env import AGENT_SOCKET
from everstep_lab.exporter.gpu import Gpu, build_gpu, with_incident, with_xid
from everstep_lab.exporter.render import Holder
from everstep_lab.kind.labnode import memory, wire
from everstep_lab.kind.labnode.attribution import build_holders, find_holder
from everstep_lab.kind.labnode.plugin import ENDPOINT, DevicePlugin
from everstep_lab.node.faults import Gpus
from everstep_lab.node.holders import Candidate
from everstep_lab.scenario import build_course

GPUS = [build_gpu(0, "worker", index) for index in range(2)]


# --- the messages -----------------------------------------------------------------------------


def test_a_registration_is_the_bytes_that_protobuf_makes() -> None:
    assert wire.build_register("a.sock", "x/y") == b"\n\x07v1beta1\x12\x06a.sock\x1a\x03x/y"


def test_devices_carry_their_health() -> None:
    assert wire.build_devices([("g", True), ("h", False)]) == (
        b"\n\x0c\n\x01g\x12\x07Healthy\n\x0e\n\x01h\x12\x09Unhealthy"
    )


def test_an_allocation_has_environment_and_read_only_mounts() -> None:
    mount = wire.Mount(container_path="/c", host_path="/h")
    assert wire.build_allocation([({"K": "v"}, [mount])]) == (
        b"\n\x14\n\x06\n\x01K\x12\x01v\x12\x0a\n\x02/c\x12\x02/h\x18\x01"
    )


def test_a_long_text_has_a_length_of_two_bytes() -> None:
    assert wire.build_register("e" * 200, "r").count(b"\xc8\x01") == 1


def test_each_container_of_an_allocate_request_has_its_own_devices() -> None:
    request = b"\n\x06\n\x01a\n\x01b" + b"\n\x03\n\x01c"
    assert wire.read_allocate_request(request) == [["a", "b"], ["c"]]


def test_pod_resources_name_pod_container_and_devices_and_fields_unknown_are_passed_over() -> None:
    devices = b"\n\x0envidia.com/gpu\x12\x02id" + b"\x1a\x00"
    container = b"\n\x01c\x12" + bytes([len(devices)]) + devices + b"\x1a\x02\x01\x02"
    pod = b"\n\x01p\x12\x02ns\x1a" + bytes([len(container)]) + container + b"\x20\x07"
    assert wire.read_pod_resources(b"\n" + bytes([len(pod)]) + pod) == [
        wire.Held(
            namespace="ns", pod="p", container="c", resource="nvidia.com/gpu", devices=("id",)
        )
    ]


@pytest.mark.parametrize("broken", [b"\n", b"\n\x05ab", b"\x0b", b"\xff" * 12])
def test_bytes_that_are_no_message_are_refused(broken: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.read_allocate_request(broken)


# --- which pod, which process -----------------------------------------------------------------


def test_only_gpus_are_attributed_to_pods() -> None:
    held = [
        wire.Held(namespace="n", pod="p", container="c", resource=resource, devices=(name,))
        for resource, name in (("nvidia.com/gpu", "g"), ("other/nic", "h"))
    ]
    assert build_holders(held) == {"g": Holder(container="c", namespace="n", pod="p")}


def process(pid: int, parent: int, age: float, **env: str) -> Candidate:
    return Candidate(pid=pid, parent=parent, age=age, env=env)


def test_the_holder_is_the_rank_and_not_the_agent_above_it_nor_a_probe() -> None:
    gpu = {"NVIDIA_VISIBLE_DEVICES": "g0,g1"}
    agent = process(10, 1, 100, **gpu)
    ranks = [
        process(11 + local, 10, 90, **gpu, **{AGENT_SOCKET: "/s", "LOCAL_RANK": str(local)})
        for local in range(2)
    ]
    probe = process(20, 1, 1, **gpu)
    other = process(30, 1, 100, NVIDIA_VISIBLE_DEVICES="g2", **{AGENT_SOCKET: "/s"})
    found = find_holder("g1", [probe, other, *ranks, agent])
    assert found is not None
    assert found.pid == 12


def test_a_container_without_ranks_holds_its_gpu_by_its_first_process() -> None:
    gpu = {"NVIDIA_VISIBLE_DEVICES": "g0"}
    found = find_holder("g0", [process(20, 1, 1, **gpu), process(10, 1, 9, **gpu)])
    assert found is not None
    assert found.pid == 10


def test_nobody_holds_a_gpu_that_no_container_was_given() -> None:
    assert find_holder("g0", [process(1, 0, 9)]) is None


# --- state that outlives the lab-node's container ---------------------------------------------


def test_the_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    gpu = with_incident(with_xid(GPUS[0], 64, 5.0), "MEM", 20, "DCGM_FR_ROW_REMAP_FAILURE")
    state = memory.State(
        boot="b", base=(gpu,), exporter="frozen",
        faults=(memory.Begun(gpu=0, code=64, seed=3, at=5.0),),
    )  # fmt: skip
    memory.put_state(tmp_path / "state.json", state)
    assert memory.load_state(tmp_path / "state.json", "b") == state


def test_after_a_boot_of_the_machine_only_what_the_board_keeps_is_left(tmp_path: Path) -> None:
    fault = memory.Begun(gpu=0, code=64, seed=3, at=5.0)
    memory.put_state(
        tmp_path / "s", memory.State(boot="b", base=tuple(GPUS), faults=(fault,), exporter="hang")
    )
    assert memory.load_state(tmp_path / "s", "c") == memory.State(boot="c", base=tuple(GPUS))


@pytest.mark.parametrize("text", ["", "{", "{}", '{"boot": "b", "base": 7}'])
def test_a_file_that_cannot_be_read_is_an_empty_state(tmp_path: Path, text: str) -> None:
    (tmp_path / "s").write_text(text)
    assert memory.load_state(tmp_path / "s", "b") == memory.State(boot="b")


class Stage:
    """Counts requests for the holder of a GPU, because code asks for a holder only to kill it."""

    def __init__(self) -> None:
        self.asked = 0

    def gpus_changed(self) -> None: ...
    async def set_exporter(self, mode: str) -> None: ...

    def find_holder(self, uuid: str) -> Candidate | None:
        self.asked += 1
        return None


async def test_a_fault_taken_up_again_is_shown_again_and_kills_nobody_a_second_time() -> None:
    stage = Stage()
    gpus = Gpus(seed=0, node="worker", count=1, stage=stage)
    begun = time.monotonic() - 60
    gpus.play(0, 94, build_course(94, random.Random(1)), begun)
    while gpus._tasks:
        await asyncio.gather(*gpus._tasks)
    assert (gpus.all[0].remap_pending, stage.asked) == (1, 0)
    assert {event.code: event.at for event in gpus.all[0].xids}[94] == begun


# --- the plugin, over gRPC --------------------------------------------------------------------


class Kubelet:
    """The kubelet's side: accepts a registration, then connects to the plugin as registered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: asyncio.Queue[bytes] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async def register(request: bytes, context: object) -> bytes:
            await self.requests.put(request)
            return b""

        service, _, method = wire.REGISTER[1:].partition("/")
        server = grpc.aio.server()
        handlers = {method: grpc.unary_unary_rpc_method_handler(register)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix://{self.folder}/kubelet.sock")
        await server.start()
        try:
            yield
        finally:
            await server.stop(None)

    def plugin(self) -> Any:
        return grpc.aio.insecure_channel(f"unix://{self.folder}/{ENDPOINT}")


@contextlib.asynccontextmanager
async def running(plugin: DevicePlugin) -> AsyncIterator[None]:
    task = asyncio.create_task(plugin.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def a_plugin(folder: Path, gpus: Callable[[], list[Gpu]]) -> DevicePlugin:
    return DevicePlugin(folder, gpus=gpus, mounts=[wire.Mount(container_path="/t", host_path="/t")])


async def test_the_kubelet_hears_of_a_gpu_that_turns_bad_and_gives_out_the_rest(
    tmp_path: Path,
) -> None:
    kubelet, gpus = Kubelet(tmp_path), list(GPUS)
    plugin = a_plugin(tmp_path, lambda: gpus)
    async with kubelet.serving(), running(plugin):
        assert await kubelet.requests.get() == wire.build_register(ENDPOINT, "nvidia.com/gpu")
        async with kubelet.plugin() as channel:
            stream = channel.unary_stream(f"/{wire.DEVICE_PLUGIN}/ListAndWatch")(b"")
            assert await stream.read() == wire.build_devices((g.uuid, True) for g in GPUS)
            gpus[0] = replace(gpus[0], device_healthy=False)
            await plugin.changed()
            assert (await stream.read()).count(b"Unhealthy") == 1
            allocate = channel.unary_unary(f"/{wire.DEVICE_PLUGIN}/Allocate")
            answer = await allocate(b"\n\x03\n\x01g")
            stream.cancel()
    assert answer == wire.build_allocation(
        [({"NVIDIA_VISIBLE_DEVICES": "g"}, [wire.Mount(container_path="/t", host_path="/t")])]
    )


async def test_it_registers_again_with_a_kubelet_that_started_anew(tmp_path: Path) -> None:
    kubelet = Kubelet(tmp_path)
    async with running(a_plugin(tmp_path, lambda: GPUS)):
        async with kubelet.serving():
            await kubelet.requests.get()
        (tmp_path / ENDPOINT).unlink()  # as a kubelet does when it starts
        async with kubelet.serving():
            async with asyncio.timeout(20):
                await kubelet.requests.get()

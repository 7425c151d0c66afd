"""Encodes and decodes the kubelet's device plugin (v1beta1) and pod-resources (v1) messages.

The field numbers are those of `k8s.io/kubelet/pkg/apis/{deviceplugin/v1beta1,podresources/v1}`
(v0.36). The messages are few and contain only strings, booleans, repeated messages and maps of
strings. The encoder therefore fits on a page, and no code generator is needed.
https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

API_VERSION = "v1beta1"
REGISTER = "/v1beta1.Registration/Register"
DEVICE_PLUGIN = "v1beta1.DevicePlugin"
LIST_POD_RESOURCES = "/v1.PodResourcesLister/List"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
EMPTY = b""

_VARINT, _BYTES = 0, 2


class WireError(ValueError):
    """The bytes are not a valid message of these APIs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    container_path: str
    host_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The devices of one resource that one container holds."""

    namespace: str
    pod: str
    container: str
    resource: str
    devices: tuple[str, ...]


def build_register(endpoint: str, resource: str) -> bytes:
    return _text(1, API_VERSION) + _text(2, endpoint) + _text(3, resource)


def build_devices(devices: Iterable[tuple[str, bool]]) -> bytes:
    """A ListAndWatchResponse, from pairs (id, is healthy)."""
    return b"".join(
        _message(1, _text(1, name) + _text(2, HEALTHY if healthy else UNHEALTHY))
        for name, healthy in devices
    )


def build_allocation(containers: Iterable[tuple[Mapping[str, str], Sequence[Mount]]]) -> bytes:
    """An AllocateResponse, from the environment and mounts of each container."""
    return b"".join(_message(1, _container(env, mounts)) for env, mounts in containers)


def read_allocate_request(data: bytes) -> list[list[str]]:
    """The requested device ids of each container. Raises WireError."""
    return [_texts(container, 1) for container in _messages(data, 1)]


def read_pod_resources(data: bytes) -> list[Held]:
    """The devices that containers hold. Raises WireError."""
    return [
        Held(
            namespace=_first(pod, 2), pod=_first(pod, 1), container=_first(container, 1),
            resource=_first(devices, 1), devices=tuple(_texts(devices, 2)),
        )
        for pod in _messages(data, 1)
        for container in _messages(pod, 3)
        for devices in _messages(container, 2)
    ]  # fmt: skip


def _container(env: Mapping[str, str], mounts: Sequence[Mount]) -> bytes:
    pairs = b"".join(
        _message(1, _text(1, key) + _text(2, value)) for key, value in sorted(env.items())
    )
    return pairs + b"".join(_message(2, _mount(mount)) for mount in mounts)


def _mount(mount: Mount) -> bytes:
    flag = _varint(3 << 3 | _VARINT) + _varint(1) if mount.read_only else b""
    return _text(1, mount.container_path) + _text(2, mount.host_path) + flag


def _text(number: int, text: str) -> bytes:
    return _message(number, text.encode()) if text else b""


def _message(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _first(data: bytes, number: int) -> str:
    return next(iter(_texts(data, number)), "")


def _texts(data: bytes, number: int) -> list[str]:
    try:
        return [body.decode() for body in _messages(data, number)]
    except UnicodeDecodeError as error:
        raise WireError(f"field {number}: {error}") from None


def _messages(data: bytes, number: int) -> list[bytes]:
    return [body for field, body in _fields(data) if field == number]


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the length-delimited fields. Numbers are skipped, also those of a newer kubelet."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        match tag & 7:
            case 0:  # a number
                _, at = _read_varint(data, at)
            case 1:  # eight bytes
                at += 8
            case 5:  # four bytes
                at += 4
            case 2:  # length and content
                size, at = _read_varint(data, at)
                if at + size > len(data):
                    raise WireError(
                        f"field {tag >> 3} announces {size} bytes, {len(data) - at} follow"
                    )
                yield tag >> 3, data[at : at + size]
                at += size
            case kind:
                raise WireError(f"field {tag >> 3} has the unknown wire type {kind}")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError("a number has no end")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at

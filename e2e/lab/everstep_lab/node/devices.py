"""Allocates GPUs to pods, as the device plugin and the kubelet do. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from everstep_lab.exporter.gpu import Gpu

RESOURCE = "nvidia.com/gpu"


def count_wanted(container: Mapping[str, Any]) -> int:
    limits = (container.get("resources") or {}).get("limits") or {}
    return int(limits.get(RESOURCE, 0))


def choose_devices(gpus: Sequence[Gpu], held: Collection[str], count: int) -> list[str] | None:
    """UUIDs of the first `count` devices that are healthy and free; None if there are fewer."""
    free = [gpu.uuid for gpu in gpus if gpu.device_healthy and gpu.uuid not in held]
    return free[:count] if len(free) >= count else None


def count_allocatable(gpus: Sequence[Gpu]) -> int:
    return sum(gpu.device_healthy for gpu in gpus)

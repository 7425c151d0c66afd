"""How many GPUs a resource list names. Pure."""

from collections.abc import Mapping
from typing import Any


def count_gpus(resources: Mapping[str, Any]) -> int:
    """GPUs of any vendor, and MIG slices (`nvidia.com/mig-…`)."""
    return sum(int(count) for name, count in resources.items() if _is_gpu(str(name)))


def _is_gpu(name: str) -> bool:
    return name.endswith("/gpu") or name.startswith("nvidia.com/mig-")

"""How many GPUs a resource list names. Pure."""

import re
from collections.abc import Mapping
from typing import Any

_FACTORS = {"": 1, "k": 1000, "M": 1_000_000}
"""The API server writes 1000 as 1k."""


def count_gpus(resources: Mapping[str, Any]) -> int:
    """GPUs of any vendor, and MIG slices (`nvidia.com/mig-…`). A number that cannot be read counts as none: a
    job's template may hold any text.
    """
    return sum(_read(str(count)) for name, count in resources.items() if _is_gpu(str(name)))


def _read(count: str) -> int:
    found = re.fullmatch(r"([0-9]+)([kM]?)", count, re.ASCII)
    return int(found[1]) * _FACTORS[found[2]] if found else 0


def _is_gpu(name: str) -> bool:
    return name.endswith("/gpu") or name.startswith("nvidia.com/mig-")

"""Counts how often a parameter or a module was registered in any module of this process. So modules
are listed again only after one of them may have changed.
"""

import functools
from typing import Any

from torch.nn.modules import module as of_torch

_count = 0


def count() -> int:
    """Number of registrations since the first call."""
    _watch()
    return _count


@functools.cache
def _watch() -> None:
    of_torch.register_module_parameter_registration_hook(_add)
    of_torch.register_module_module_registration_hook(_add)


def _add(*_: Any) -> None:
    global _count
    _count += 1

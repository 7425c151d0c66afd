"""Names that survive a wrapper: `_orig_mod.` (torch.compile) and `module.` (DataParallel and its
kin) are left out. Pure.
"""

from collections import Counter
from collections.abc import Iterable

WRAPPERS = frozenset({"_orig_mod", "module"})


def canonical(keys: Iterable[str]) -> dict[str, str]:
    """For each key the name it is stored under; keys that would collide keep their own."""
    stripped = {key: _strip(key) for key in keys}
    taken = Counter(stripped.values())
    return {key: name if name and taken[name] == 1 else key for key, name in stripped.items()}


def _strip(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)

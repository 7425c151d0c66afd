"""Names of parameters without the prefixes of wrappers: `_orig_mod.` (torch.compile) and `module.`
(DataParallel and the like). Pure.
"""

from collections import Counter
from collections.abc import Iterable

WRAPPERS = frozenset({"_orig_mod", "module"})


def canonical(keys: Iterable[str]) -> dict[str, str]:
    """Map each key to the name under which it is stored; keys that would collide stay as they
    are.
    """
    stripped = {key: _strip(key) for key in keys}
    taken = Counter(stripped.values())
    return {key: name if name and taken[name] == 1 else key for key, name in stripped.items()}


def _strip(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)

"""Names of parameters without the prefixes of wrappers: `_orig_mod.` (torch.compile) and `module.`
(DataParallel and the like). Pure.
"""

from collections import Counter
from collections.abc import Iterable

COMPILED = "_orig_mod"
WRAPPERS = frozenset({COMPILED, "module"})


def canonical(keys: Iterable[str]) -> dict[str, str]:
    """Map each key to the name under which it is stored; keys that would collide stay as they
    are.
    """
    stripped = {key: _strip(key) for key in keys}
    taken = Counter(stripped.values())
    return {key: name if name and taken[name] == 1 else key for key, name in stripped.items()}


def plain(keys: Iterable[str]) -> dict[str, str]:
    """Map the name under which a key is stored to the key in the module's own `state_dict`, where the two differ
    without torch.compile, too: a part `module` may belong to the module, as in AveragedModel.
    """
    found = {}
    for key, stored in canonical(keys).items():
        own = ".".join(part for part in key.split(".") if part != COMPILED)
        if own != stored and stored != key:  # else the names of two keys would collide
            found[stored] = own
    return found


def _strip(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)

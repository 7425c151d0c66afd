"""Removes secrets from a support bundle. Pure.

Secret objects are never read. The value of each environment variable that is not Everstep's own
(and of Everstep's keys and tokens), and the argument after a flag such as --api-key, are removed
from the object that holds them, and from every text of the bundle in which they occur.
Whatever looks like a credential is removed from every text.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from everstep_contract.env import PREFIX

GONE = "[redacted]"
SHORTEST = 8
"""Values shorter than this (1, true, debug) stay, because removing them would remove harmless text.
"""
DROPPED = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
NAMES_ONLY = frozenset({"secretName", "secretNamespace"})
_WORD = (
    r"(?:secret|token|passw(?:or)?d|credential|(?:api|account|private|operator)[_-]?key"
    r"|access[_-]?key(?:[_-]?id)?|auth)"
)
_OWN_SECRET = re.compile(rf"{PREFIX}\w*(?:KEY|TOKEN)")
_ASSIGNED = re.compile(rf"(?i)([\w.-]*{_WORD}[\w.-]*[\"']?\s*[=:]\s*[\"']?)([^\s\"',;&]{{4,}})")
_BARE_FLAG = re.compile(rf"(?i)--?[\w.-]*{_WORD}[\w.-]*|--key")
_FLAG = re.compile(rf"(?i)(--?[\w.-]*{_WORD}[\w.-]*\s+)(\S+)")
_PATTERNS = (
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
    re.compile(r"(?i)(?<=authorization: basic )[\w+/=-]{4,}"),
    re.compile(r"(?<=--key[= ])\S+"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?:(?<=https://)|(?<=http://))[^/\s@?#\"']+(?=@)"),
    re.compile(r"(?i)(?:(?<=[?&]sig=)|(?<=signature=))[^\s\"'&,]+"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.S),
    re.compile(r"\b(?:hf_|ghp_|github_pat_|xox[abp]-|sk-)[\w-]{12,}"),
)


def find_values(objects: Iterable[Any]) -> frozenset[str]:
    """Values of environment variables and arguments that must not appear anywhere."""
    found: set[str] = set()
    for obj in objects:
        _collect(obj, found)
    return frozenset(v for v in found if len(v) >= SHORTEST)


def _collect(value: Any, found: set[str]) -> None:
    if isinstance(value, Mapping):
        if _is_foreign_variable(value):
            found.add(str(value["value"]))
        for part in value.values():
            _collect(part, found)
    elif isinstance(value, list):
        found |= {value[k] for k in _find_arguments(value)}
        for part in value:
            _collect(part, found)


def _find_arguments(value: list[Any]) -> set[int]:
    """Positions in a command of the arguments that follow a flag for a credential."""
    return {
        k
        for k, (flag, argument) in enumerate(itertools.pairwise(value), 1)
        if isinstance(flag, str)
        and isinstance(argument, str)
        and _BARE_FLAG.fullmatch(flag)
        and not argument.startswith("-")
    }


def _is_foreign_variable(value: Mapping[str, Any]) -> bool:
    """Whether this is a container's {name, value} that is not Everstep's own, or is a key or token
    of Everstep. The operator and the chart take these from Secrets; other installations may not.
    """
    if set(value) != {"name", "value"} or not isinstance(value["value"], str):
        return False
    name = str(value["name"])
    return not name.startswith(PREFIX) or _OWN_SECRET.fullmatch(name) is not None


def clean_object(value: Any, values: Collection[str] = ()) -> Any:
    """The object without the values of variables, without managedFields and the last-applied
    configuration, and with every string cleaned by `clean_text`.
    """
    if isinstance(value, Mapping):
        if _is_foreign_variable(value):
            return {"name": value["name"], "value": GONE}
        kept = {k: v for k, v in value.items() if k not in DROPPED}
        return {k: _clean_field(str(k), v, values) for k, v in kept.items()}
    if isinstance(value, list):
        secret = _find_arguments(value)
        return [GONE if k in secret else clean_object(v, values) for k, v in enumerate(value)]
    return clean_text(value, values) if isinstance(value, str) else value


def _clean_field(key: str, value: Any, values: Collection[str]) -> Any:
    if isinstance(value, str) and key not in NAMES_ONLY and re.search(rf"(?i){_WORD}", key):
        return GONE
    return clean_object(value, values)


def clean_text(text: str, values: Collection[str] = ()) -> str:
    """The text without these values and without whatever looks like a credential."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, GONE)
    for pattern in _PATTERNS:
        text = pattern.sub(GONE, text)
    text = _FLAG.sub(rf"\1{GONE}", text)
    return _ASSIGNED.sub(_keep_name, text)


def _keep_name(found: "re.Match[str]") -> str:
    return found[0] if found[2].startswith(GONE[:5]) else f"{found[1]}{GONE}"

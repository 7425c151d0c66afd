"""Values as documents for programs: `-o json` and `-o yaml`. Pure."""

import dataclasses
import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@%+-]*\Z")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def to_document(value: Any) -> Any:
    """JSON values; dataclasses become objects whose names are written as in the API."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {camel(f.name): to_document(getattr(value, f.name)) for f in fields}
    if isinstance(value, dict):
        return {str(k): to_document(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_document(v) for v in value]
    return value


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


def write(value: Any, form: str) -> str:
    """`form`: json or yaml."""
    document = to_document(value)
    if form == "json":
        return json.dumps(document, indent=2, ensure_ascii=False)
    return to_yaml(document)


def to_yaml(value: Any) -> str:
    """JSON values as YAML in block style; strings that could be read as something else are quoted."""
    return "\n".join(_lines(value))


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for k, v in value.items() for line in _entry(f"{_scalar(k)}:", v)]
    if isinstance(value, list) and value:
        return [line for v in value for line in _item(v)]
    return [_scalar(value)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, dict | list) and value:
        return [key, *("  " + line for line in _lines(value))]
    return [f"{key} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *("  " + line for line in rest)]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.match(value) and value.lower() not in _WORDS:
        return value
    if isinstance(value, float):
        # YAML 1.1 reads 1e+16 as a string: a number needs a decimal point.
        return re.sub(r"^(-?\d+)e", r"\1.0e", json.dumps(value))
    if not isinstance(value, str):
        return json.dumps(value)
    return "".join(_character(c) for c in json.dumps(value, ensure_ascii=False))


def _character(one: str) -> str:
    """Escape one character. YAML has JSON's escapes, except for characters beyond 16 bits."""
    if one.isprintable() and ord(one) < 0xFFFF:
        return one
    return f"\\U{ord(one):08x}"

"""One line per event on stderr: `everstep event=… key=value …`, for people and for grep."""

import json
import sys
from typing import Any, TextIO

PREFIX = "everstep event="


def format_line(event: str, fields: dict[str, Any]) -> str:
    parts = [f"{PREFIX}{event}"]
    parts += [f"{k}={_value(v)}" for k, v in fields.items() if v is not None and v != ""]
    return " ".join(parts)


def parse_line(line: str) -> tuple[str, dict[str, str]] | None:
    """The event and its fields; None for a line that Everstep did not write."""
    if not line.startswith(PREFIX):
        return None
    fields: dict[str, str] = {}
    rest = line.strip()
    while rest:
        key, _, rest = rest.partition("=")
        if rest.startswith('"'):
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                return None
            rest = rest[end:].lstrip()
        else:
            value, _, rest = rest.partition(" ")
        fields[key.strip()] = value
    return fields.pop("everstep event"), fields


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    plain = text and all(c.isprintable() and c not in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


class Log:
    """Binds fields (slot, attempt, …) to every line."""

    def __init__(self, stream: TextIO | None = None, **fields: Any) -> None:
        self._stream = stream
        self._fields = fields

    def bind(self, **fields: Any) -> "Log":
        return Log(self._stream, **{**self._fields, **fields})

    def say(self, event: str, **fields: Any) -> None:
        line = format_line(event, {**self._fields, **fields})
        print(line, file=self._stream or sys.stderr, flush=True)


class Once:
    """Logs a wait once for each kind of trouble, until it has passed.

    Only the kind is compared, because the message may name another object at each try.
    """

    def __init__(self, line: Log, event: str) -> None:
        self._line = line
        self._event = event
        self._kinds: list[str] = []

    def say(self, *, kind: str, **fields: Any) -> None:
        if kind not in self._kinds:
            self._kinds.append(kind)
            self._line.say(self._event, kind=kind, **fields)

    def passed(self) -> None:
        if self._kinds:
            self._line.say(f"{self._event}_no_more", kind=self._kinds[-1])
            self._kinds.clear()

"""Log lines: time, level, logger, text, then searchable fields: `job=team/lm reason=NodeLeaving
incident=…`.
"""

import json
import logging
import time
from collections.abc import Mapping

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
}
"""Control characters. Users write some texts, and a terminal would obey what is in them."""
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class Formatter(logging.Formatter):
    """One line per entry, even if a message contains line breaks or other control characters. Times are
    in UTC, as in statuses and Events, whatever time zone the container has.
    """

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record).translate(_ESCAPES)
        fields: dict[str, str] = getattr(record, "fields", {})
        return " ".join([line, *(f"{k}={_shown(v)}" for k, v in fields.items() if v)])


def _shown(value: str) -> str:
    plain = all(c.isprintable() and c not in ' "=' for c in value)
    return value if plain else json.dumps(value, ensure_ascii=False)


def fields(**named: str) -> dict[str, dict[str, str]]:
    """For the argument `extra` of a log call."""
    return {"fields": named}


class OnChange:
    """Warnings that are repeated only when their text changes."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, str] = {}

    def say(self, about: str, text: str) -> None:
        if self._said.get(about) != text:
            self._said[about] = text
            self._log.warning("%s: %s", about, text)

    def say_all(self, prefix: str, texts: Mapping[str, str]) -> None:
        """`texts`: all current warnings whose keys begin with `prefix`. Earlier ones that are not
        among them are over.
        """
        for about in [a for a in self._said if a.startswith(prefix) and a not in texts]:
            del self._said[about]
        for about, text in texts.items():
            self.say(about, text)

    def forget(self, about: str) -> None:
        self._said.pop(about, None)


def start(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.WARNING)

"""Log lines: time, level, place, the words, then fields to search by: `job=team/lm reason=NodeLeaving incident=…`."""

import json
import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class Formatter(logging.Formatter):
    """One line an entry, whatever a script or an API server has put into its message."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")
        fields: dict[str, str] = getattr(record, "fields", {})
        return " ".join([line, *(f"{k}={_shown(v)}" for k, v in fields.items() if v)])


def _shown(value: str) -> str:
    plain = all(c.isprintable() and c not in ' "=' for c in value)
    return value if plain else json.dumps(value, ensure_ascii=False)


def fields(**named: str) -> dict[str, dict[str, str]]:
    """For the argument `extra` of a log call."""
    return {"fields": named}


def start(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("kopf").setLevel(logging.WARNING)

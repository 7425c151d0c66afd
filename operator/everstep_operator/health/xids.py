"""The table of XID codes, read once from `xids.yaml`."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

import yaml


class XidVerdict(enum.Enum):
    LEAVING = "leaving"
    GONE = "gone"
    NOTE = "note"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    code: int
    name: str = ""
    """Mnemonic in the driver's header."""
    verdict: XidVerdict = XidVerdict.NOTE
    meaning: str = "not in our table"
    source: str = ""
    note: str = ""

    @property
    def convicts(self) -> bool:
        return self.verdict in (XidVerdict.LEAVING, XidVerdict.GONE)


XidTable = Mapping[int, Xid]


def load_xids() -> XidTable:
    """Raises ValueError, naming the code, if the table is invalid."""
    text = resources.files("everstep_operator.health").joinpath("xids.yaml").read_text("utf-8")
    return parse_xids(text)


def parse_xids(text: str) -> XidTable:
    table: dict[int, Xid] = {}
    for code, entry in (yaml.safe_load(text) or {}).items():
        try:
            verdict = XidVerdict(entry.pop("verdict"))
            table[int(code)] = Xid(code=int(code), verdict=verdict, **entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"XID {code}: {entry!r} is invalid: {error!r}") from None
    return MappingProxyType(table)


def find_xid(table: XidTable, code: int) -> Xid:
    return table.get(code) or Xid(code=code)

"""The effects of a fault on exporter, rank and node.

Pure: the same fault and seed always give the same list of timed effects. The table follows
NVIDIA's published descriptions of the XIDs. A node applies the effects (`node/faults.py`).
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep_lab.exporter.gpu import FAIL, WARN

DEVICE_PLUGIN_IGNORES = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs after which NVIDIA's device plugin still reports the device healthy."""

DEVASTATING = frozenset({48, 74, 79, 95, 119, 120, 140})
"""XIDs that DCGM always watches and reports as a failure of the watch ALL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowXid:
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowIncident:
    watch: str
    level: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddToGpu:
    """Adds to the GPU's counters. For 0/1 flags use `SetOnGpu`."""

    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOnGpu:
    values: Mapping[str, int | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetExporter:
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillRank:
    """Send SIGKILL to the process that holds the GPU: the rank's process, not the agent."""

    lasting: bool = False
    """If set, a process that uses the GPU later is killed too, at its first CUDA call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRank:
    """Send SIGSTOP to the process that holds the GPU.

    It then behaves as in a driver call that never returns.
    """


Effect = ShowXid | ShowIncident | AddToGpu | SetOnGpu | SetExporter | KillRank | HangRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    at: float
    """Seconds after the fault."""
    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The effects of one fault over time."""

    title: str
    effects: tuple[Timed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The source of a fault's random choices. The same seed gives the same effects."""

    seed: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_random", random.Random(self.seed))

    def plan_xid(self, code: int) -> Course:
        """The effects of an XID on one GPU; see `build_course`."""
        return build_course(code, self._random)


def build_course(code: int, chance: random.Random) -> Course:
    """The effects of an XID on one GPU.

    For a code without a row in the table, the exporter shows the code, and only the effects of
    `_always` follow. Raises `ValueError` for a code outside 1 to 185, which no driver reports.
    """
    if not 1 <= code <= 185:
        raise ValueError(f"XID {code}: expected a code from 1 to 185")
    row = _ROWS.get(code)
    title, steps = (
        row(chance) if row else (_EXPORTER_ONLY, [Timed(at=0, effect=ShowXid(code=code))])
    )
    steps = [*steps, *_always(code)]
    return Course(title=title, effects=tuple(sorted(steps, key=lambda timed: timed.at)))


_EXPORTER_ONLY = "the exporter shows the code; the rank continues"


def _always(code: int) -> list[Timed]:
    """Effects that do not depend on the table.

    If the code concerns them, the watch ALL changes at once and the device plugin a second later.
    """
    steps = []
    if code in DEVASTATING and code != 79:
        steps.append(
            _at(0, ShowIncident(watch="ALL", level=FAIL, code=_FR.get(code, "DCGM_FR_XID_ERROR")))
        )
    if code not in DEVICE_PLUGIN_IGNORES:
        steps.append(_at(1.0, SetOnGpu(values={"device_healthy": False})))
    return steps


_FR = {
    48: "DCGM_FR_VOLATILE_DBE_DETECTED",
    74: "DCGM_FR_NVLINK_ERROR_CRITICAL",
    95: "DCGM_FR_UNCONTAINED_ERROR",
}

_Row = tuple[str, list[Timed]]


def _at(at: float, effect: Effect) -> Timed:
    return Timed(at=at, effect=effect)


def _soon(chance: random.Random) -> float:
    """A random delay of less than a second: the time until the next CUDA call."""
    return chance.uniform(0.1, 0.9)


def _app_fault(chance: random.Random) -> _Row:
    return "illegal address in the program: its rank dies, the GPU is healthy", [
        _at(0, ShowXid(code=31)), _at(0.1, ShowXid(code=45)), _at(_soon(chance), KillRank()),
    ]  # fmt: skip


def _remap_failure(chance: random.Random) -> _Row:
    return "a row remap failed: the exporter shows it, the rank continues", [
        _at(0, ShowXid(code=64)),
        _at(0, SetOnGpu(values={"remap_failure": 1, "recovery_action": 1})),
        _at(0, ShowIncident(watch="MEM", level=FAIL, code="DCGM_FR_ROW_REMAP_FAILURE")),
    ]


def _contained(chance: random.Random) -> _Row:
    return "contained memory error: the process that read it dies, a remap is pending", [
        _at(0, ShowXid(code=94)), _at(0, ShowXid(code=63)), _at(0.1, ShowXid(code=45)),
        _at(0, SetOnGpu(values={"remap_pending": 1, "recovery_action": 4})),
        _at(0, AddToGpu(counters={"remapped_uncorrectable": 1})),
        _at(0, ShowIncident(watch="MEM", level=WARN, code="DCGM_FR_CONTAINED_ERROR")),
        _at(_soon(chance), KillRank()),
    ]  # fmt: skip


def _double_bit(code: int, chance: random.Random) -> _Row:
    follower = [_at(0, ShowXid(code=95))] if code == 48 else []
    return "uncorrectable memory error: every process on the GPU dies", [
        _at(0, ShowXid(code=code)), *follower, _at(0.1, ShowXid(code=45)),
        _at(0, AddToGpu(counters={"dbe_volatile": 1, "dbe_aggregate": 1})),
        _at(0, SetOnGpu(values={"recovery_action": 1})),
        _at(0, ShowIncident(watch="MEM", level=FAIL, code="DCGM_FR_VOLATILE_DBE_DETECTED")),
        _at(_soon(chance), KillRank(lasting=True)),
    ]  # fmt: skip


def _off_the_bus(chance: random.Random) -> _Row:
    return "the GPU fell off the bus: its rank dies within a second, its series vanish", [
        _at(0, SetOnGpu(values={"present": False, "recovery_action": 2})),
        _at(_soon(chance), KillRank(lasting=True)),
    ]


def _gsp_timeout(chance: random.Random) -> _Row:
    return "the GPU's firmware hangs: the rank hangs, the exporter freezes, then answers 500", [
        _at(0, ShowXid(code=119)), _at(_soon(chance), HangRank()),
        _at(1.5, SetExporter(mode="frozen")), _at(5.0, SetExporter(mode="http500")),
        _at(0, SetOnGpu(values={"recovery_action": 1})),
    ]  # fmt: skip


def _nvlink(chance: random.Random) -> _Row:
    """About half of the ranks on such a link get an NCCL error; the others continue."""
    dies = [_at(_soon(chance), KillRank())] if chance.random() < 0.5 else []
    fate = "its rank dies" if dies else "its rank continues"
    return f"NVLink error: CRC, replay and recovery counters rise; {fate}", [
        _at(0, ShowXid(code=74)),
        _at(0, AddToGpu(counters={"nvlink_crc": 120, "nvlink_replay": 3, "nvlink_recovery": 1})),
        _at(0, SetOnGpu(values={"recovery_action": 1})),
        _at(0, ShowIncident(watch="NVLINK", level=FAIL, code="DCGM_FR_NVLINK_ERROR_CRITICAL")),
        *dies,
    ]  # fmt: skip


_ROWS = {
    31: _app_fault,
    48: lambda chance: _double_bit(48, chance),
    64: _remap_failure,
    74: _nvlink,
    79: _off_the_bus,
    94: _contained,
    95: lambda chance: _double_bit(95, chance),
    119: _gsp_timeout,
}

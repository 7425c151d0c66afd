"""The state of one simulated GPU, as the driver and DCGM report it.

Only the count windows clear by themselves. Other values stay latched until the driver is reloaded.
Those in the InfoROM (aggregate ECC, remapped rows, a failed remap) remain even after a reload.
"""

import hashlib
import uuid
from dataclasses import dataclass, replace

MODEL = "NVIDIA H100 80GB HBM3"
FRAMEBUFFER_MIB = 81559
HEALTH_WATCHES = (
    "PCIE", "NVLINK", "PMU", "MCU", "MEM", "SM", "INFOROM", "THERMAL", "POWER", "DRIVER", "ALL",
)  # fmt: skip

PASS, WARN, FAIL = 0, 10, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    at: float
    """Seconds on the clock of `render`."""
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthIncident:
    watch: str
    level: int
    code: str
    """A `DCGM_FR_*` name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    uuid: str
    present: bool = True
    """False if NVML no longer lists the GPU. Then all series of its UUID are missing."""
    device_healthy: bool = True
    """The device plugin's view: an unhealthy device is not allocatable."""
    loaded_at: float = 0.0
    """The time at which the driver was loaded."""
    xid: int = 0
    """The last XID, latched."""
    xids: tuple[XidEvent, ...] = ()
    health: tuple[HealthIncident, ...] = ()
    """Latched, newest last. If a watch has several, the exporter shows only the last of them."""
    sbe_volatile: int = 0
    dbe_volatile: int = 0
    sbe_aggregate: int = 0
    dbe_aggregate: int = 0
    remapped_correctable: int = 0
    remapped_uncorrectable: int = 0
    remap_pending: int = 0
    remap_failure: int = 0
    recovery_action: int = 0
    pcie_replays: int = 0
    nvlink_crc: int = 0
    nvlink_replay: int = 0
    nvlink_recovery: int = 0

    @property
    def pci_bus_id(self) -> str:
        return f"00000000:{0x18 + 0x11 * self.index:02X}:00.0"

    @property
    def device(self) -> str:
        return f"nvidia{self.index}"


def build_gpu(seed: int, node: str, index: int) -> Gpu:
    """The same seed, node and index always give the same UUID."""
    digest = hashlib.sha256(f"{seed}/{node}/{index}".encode()).digest()
    return Gpu(index=index, uuid=f"GPU-{uuid.UUID(bytes=digest[:16], version=4)}")


def with_xid(gpu: Gpu, code: int, now: float) -> Gpu:
    """Record an XID. It overwrites the gauge of the last XID; the count window keeps all codes."""
    return replace(gpu, xid=code, xids=(*gpu.xids, XidEvent(at=now, code=code)))


def with_incident(gpu: Gpu, watch: str, level: int, code: str) -> Gpu:
    incident = HealthIncident(watch=watch, level=level, code=code)
    return replace(gpu, health=(*gpu.health, incident))


def reload_driver(gpu: Gpu, now: float) -> Gpu:
    """The state after a reboot. A pending remap has been done; NVML never clears a failed one."""
    return Gpu(
        index=gpu.index,
        uuid=gpu.uuid,
        loaded_at=now,
        sbe_aggregate=gpu.sbe_aggregate,
        dbe_aggregate=gpu.dbe_aggregate,
        remapped_correctable=gpu.remapped_correctable,
        remapped_uncorrectable=gpu.remapped_uncorrectable,
        remap_failure=gpu.remap_failure,
    )

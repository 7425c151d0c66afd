"""The exporter's metrics: its default CSV, and the health CSV that a cluster should use.

Names, order, types and help texts are those of dcgm-exporter. Its TYPE lines wrongly call the
windowed `DCGM_EXP_*` gauges counters; a reader must ignore that. The function `Field.value` returns
the value for one GPU. If it returns None, the series is left out, as the exporter does with DCGM's
blank values.
"""

from collections.abc import Callable
from dataclasses import dataclass

from everstep_lab.exporter.gpu import FRAMEBUFFER_MIB, Gpu
from everstep_lab.exporter.load import Load

Value = Callable[[Gpu, Load], float | None]


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: str
    help: str
    value: Value


DEFAULT: tuple[Field, ...] = (
    Field("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).", lambda g, n: n.sm_clock),
    Field("DCGM_FI_DEV_MEM_CLOCK", "gauge", "Memory clock frequency (in MHz).", lambda g, n: 2619),
    Field("DCGM_FI_DEV_MEMORY_TEMP", "gauge",
          "Memory temperature (in C).", lambda g, n: n.celsius + 8),
    Field("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).", lambda g, n: n.celsius),
    Field("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).", lambda g, n: n.watts),
    Field("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter",
          "Total energy consumption since boot (in mJ).", lambda g, n: n.millijoules),
    Field("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "Total number of PCIe retries.",
          lambda g, n: g.pcie_replays),
    Field("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %).", lambda g, n: n.percent),
    Field("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge",
          "Memory utilization (in %).", lambda g, n: n.percent // 2),
    Field("DCGM_FI_DEV_ENC_UTIL", "gauge", "Encoder utilization (in %).", lambda g, n: 0),
    Field("DCGM_FI_DEV_DEC_UTIL", "gauge", "Decoder utilization (in %).", lambda g, n: 0),
    Field("DCGM_FI_DEV_XID_ERRORS", "gauge",
          "Value of the last XID error encountered.", lambda g, n: g.xid),
    Field("DCGM_FI_DEV_FB_FREE", "gauge", "Framebuffer memory free (in MiB).",
          lambda g, n: FRAMEBUFFER_MIB - n.framebuffer_used - 551),
    Field("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB).",
          lambda g, n: n.framebuffer_used),
    Field("DCGM_FI_DEV_FB_RESERVED", "gauge",
          "Framebuffer memory reserved (in MiB).", lambda g, n: 551),
    Field("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter",
          "Number of remapped rows for uncorrectable errors",
          lambda g, n: g.remapped_uncorrectable),
    Field("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter",
          "Number of remapped rows for correctable errors", lambda g, n: g.remapped_correctable),
    Field("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "Whether remapping of rows has failed",
          lambda g, n: g.remap_failure),
    Field("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter",
          "Total number of NVLink bandwidth counters for all lanes.", lambda g, n: n.nvlink_bytes),
    Field("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "gauge", "vGPU License status", lambda g, n: 0),
    Field("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the graphics engine is active.",
          lambda g, n: n.percent / 100),
    Field("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge",
          "Ratio of cycles the tensor (HMMA) pipe is active.", lambda g, n: n.percent / 250),
    Field("DCGM_FI_PROF_DRAM_ACTIVE", "gauge",
          "Ratio of cycles the device memory interface is active sending or receiving data.",
          lambda g, n: n.percent / 200),
    Field("DCGM_FI_PROF_PCIE_TX_BYTES", "gauge",
          "The rate of data transmitted over the PCIe bus (in bytes per second).",
          lambda g, n: n.percent * 1_000_000),
    Field("DCGM_FI_PROF_PCIE_RX_BYTES", "gauge",
          "The rate of data received over the PCIe bus (in bytes per second).",
          lambda g, n: n.percent * 2_000_000),
)  # fmt: skip

HEALTH: tuple[Field, ...] = (
    *DEFAULT,
    Field("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "gauge", "Current clock event reasons (bitmask).",
          lambda g, n: n.clock_events),
    Field("DCGM_FI_DEV_GPU_TEMP_LIMIT", "gauge",
          "Thermal margin to the slowdown temperature (in C).",
          lambda g, n: 87 - n.celsius),
    Field("DCGM_FI_DEV_FABRIC_MANAGER_STATUS", "gauge",
          "Status of the fabric manager.", lambda g, n: 3),
    Field("DCGM_FI_DEV_PCIE_MAX_LINK_GEN", "gauge", "PCIe max link generation.", lambda g, n: 5),
    Field("DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", "gauge", "PCIe max link width.", lambda g, n: 16),
    Field("DCGM_FI_DEV_PCIE_LINK_GEN", "gauge", "PCIe current link generation.", lambda g, n: 5),
    Field("DCGM_FI_DEV_PCIE_LINK_WIDTH", "gauge", "PCIe current link width.", lambda g, n: 16),
    Field("DCGM_FI_DEV_POWER_VIOLATION", "counter",
          "Throttling duration due to power constraints (in ns).",
          lambda g, n: 0),
    Field("DCGM_FI_DEV_THERMAL_VIOLATION", "counter",
          "Throttling duration due to thermal constraints (in ns).", lambda g, n: 0),
    Field("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "counter",
          "Total number of single-bit volatile ECC errors.",
          lambda g, n: g.sbe_volatile),
    Field("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter",
          "Total number of double-bit volatile ECC errors.",
          lambda g, n: g.dbe_volatile),
    Field("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "counter",
          "Total number of single-bit persistent ECC errors.",
          lambda g, n: g.sbe_aggregate),
    Field("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", "counter",
          "Total number of double-bit persistent ECC errors.",
          lambda g, n: g.dbe_aggregate),
    Field("DCGM_FI_DEV_ROW_REMAP_PENDING", "gauge", "Whether remapping of rows is pending",
          lambda g, n: g.remap_pending),
    Field("DCGM_FI_DEV_BANKS_REMAP_ROWS_AVAIL_NONE", "gauge",
          "Memory banks with no spare rows available for remapping", lambda g, n: g.remap_failure),
    Field("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "counter",
          "Total number of NVLink flow-control CRC errors.", lambda g, n: g.nvlink_crc),
    Field("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "counter",
          "Total number of NVLink data CRC errors.", lambda g, n: 0),
    Field("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "counter",
          "Total number of NVLink retries.",
          lambda g, n: g.nvlink_replay),
    Field("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "counter",
          "Total number of NVLink recovery errors.", lambda g, n: g.nvlink_recovery),
    Field("DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "gauge", "GPU recovery action.",
          lambda g, n: g.recovery_action),
)  # fmt: skip

CSV = {"default": DEFAULT, "health": HEALTH}

"""Renders the state of GPUs at a given time as dcgm-exporter's Prometheus text.

The labels are in the exporter's order: gpu, UUID, pci_bus_id, device, modelName, Hostname, the
CSV's `label` fields, then the attributes of the sample and the pod that holds the device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep_lab.exporter.csv import CSV, Field
from everstep_lab.exporter.gpu import HEALTH_WATCHES, MODEL, PASS, Gpu
from everstep_lab.exporter.load import CLOCK_IDLE, CLOCK_POWER_CAP, build_load

DRIVER_VERSION = "580.95.05"
WINDOW_MS = 300_000

XID_TEXT: Mapping[int, str] = {
    0: "No Error",
    13: "Graphics Engine Exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "Preemptive cleanup, due to previous errors -- Most likely to see when running multiple "
        "cuda applications and hitting a DBE",
    48: "Double Bit ECC Error",
    63: "ECC page retirement or row remapping recording event",
    64: "ECC page retirement or row remapper recording failure",
    74: "NVLINK Error",
    79: "GPU has fallen off the bus",
    94: "Contained ECC error",
    95: "Uncontained ECC error",
    119: "GSP RPC Timeout",
    120: "GSP Error",
}  # fmt: skip

_XID_COUNT_HELP = (
    "Count of XID Errors within user-specified time window (see xid-count-window-size param)."
)
_CLOCK_COUNT_HELP = (
    "Count of clock events within the user-specified time window "
    "(see clock-events-count-window-size param)."
)
_CLOCK_EVENTS = {
    "gpu_idle": CLOCK_IDLE,
    "clocks_setting": 0x2,
    "power_cap": CLOCK_POWER_CAP,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The pod that holds a device."""

    container: str
    namespace: str
    pod: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    csv: str = "health"
    """`default` or `health`."""
    hostname_label: str = "Hostname"
    """Name of the host label. The real exporter has called it `hostname` since May 2026."""
    pod_labels: bool = True


def render(
    gpus: Sequence[Gpu],
    *,
    node: str,
    holders: Mapping[str, Holder],
    now: float,
    options: Options = Options(),
) -> str:
    """The complete page. `holders` is keyed by GPU UUID. `now` is on the clock of `Gpu.xids`."""
    page = _Page(node=node, holders=holders, options=options)
    present = [gpu for gpu in gpus if gpu.present]
    if not present:
        return ""
    lines: list[str] = []
    for field in CSV[options.csv]:
        lines += _family(field, present, page, now)
    if options.csv == "health":
        lines += _xid_counts(present, page, now)
        lines += _clock_counts(present, page, now)
        lines += _health(present, page)
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    node: str
    holders: Mapping[str, Holder]
    options: Options

    def line(self, name: str, gpu: Gpu, extra: Iterable[tuple[str, str]], value: float) -> str:
        labels = [
            ("gpu", str(gpu.index)), ("UUID", gpu.uuid), ("pci_bus_id", gpu.pci_bus_id),
            ("device", gpu.device), ("modelName", MODEL), (self.options.hostname_label, self.node),
            ("DCGM_FI_DRIVER_VERSION", DRIVER_VERSION), *extra, *self._holder(gpu),
        ]  # fmt: skip
        inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
        return f"{name}{{{inside}}} {_number(value)}"

    def _holder(self, gpu: Gpu) -> list[tuple[str, str]]:
        holder = self.holders.get(gpu.uuid)
        if holder is None or not self.options.pod_labels:
            return []
        return [
            ("container", holder.container), ("namespace", holder.namespace), ("pod", holder.pod),
        ]  # fmt: skip


def _family(field: Field, gpus: Sequence[Gpu], page: _Page, now: float) -> list[str]:
    lines = _head(field.name, field.type, field.help)
    for gpu in gpus:
        value = field.value(gpu, build_load(gpu, busy=gpu.uuid in page.holders, now=now))
        if value is not None:
            extra = _xid_labels(gpu) if field.name == "DCGM_FI_DEV_XID_ERRORS" else []
            lines.append(page.line(field.name, gpu, extra, value))
    return lines


def _xid_labels(gpu: Gpu) -> list[tuple[str, str]]:
    return [("err_code", str(gpu.xid)), ("err_msg", XID_TEXT.get(gpu.xid, "Unknown Error"))]


def _xid_counts(gpus: Sequence[Gpu], page: _Page, now: float) -> list[str]:
    """One series per GPU and XID code in the window.

    A GPU without XIDs in the window has one series of value 0, without the label `xid`.
    """
    name = "DCGM_EXP_XID_ERRORS_COUNT"
    lines = _head(name, "counter", _XID_COUNT_HELP)
    window = ("window_size_in_ms", str(WINDOW_MS))
    for gpu in gpus:
        counts: dict[int, int] = {}
        for event in gpu.xids:
            if event.at > now - WINDOW_MS / 1000:
                counts[event.code] = counts.get(event.code, 0) + 1
        if not counts:
            lines.append(page.line(name, gpu, [window], 0))
        for code in sorted(counts):
            lines.append(page.line(name, gpu, [window, ("xid", str(code))], counts[code]))
    return lines


def _clock_counts(gpus: Sequence[Gpu], page: _Page, now: float) -> list[str]:
    """One harmless event per GPU is always counted: power capping under load, idling otherwise."""
    name = "DCGM_EXP_CLOCK_EVENTS_COUNT"
    lines = _head(name, "counter", _CLOCK_COUNT_HELP)
    for gpu in gpus:
        bits = build_load(gpu, busy=gpu.uuid in page.holders, now=now).clock_events
        seconds = min(WINDOW_MS / 1000, max(0.0, now - gpu.loaded_at))
        for event, bit in _CLOCK_EVENTS.items():
            if bits & bit:
                extra = [("clock_event", event), ("window_size_in_ms", str(WINDOW_MS))]
                lines.append(page.line(name, gpu, extra, int(seconds)))
    return lines


def _health(gpus: Sequence[Gpu], page: _Page) -> list[str]:
    name = "DCGM_EXP_GPU_HEALTH_STATUS"
    lines = _head(name, "counter", "Overall health status of the GPU (see health watches).")
    for gpu in gpus:
        shown = {incident.watch: incident for incident in gpu.health}
        for watch in HEALTH_WATCHES:
            incident = shown.get(watch)
            code, level = (incident.code, incident.level) if incident else ("", PASS)
            extra = [("health_watch", watch), ("health_error_code", code)]
            lines.append(page.line(name, gpu, extra, level))
    return lines


def _head(name: str, type: str, help: str) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {type}"]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Integers as they are, other numbers with six decimal places, like the exporter's %f."""
    return str(value) if isinstance(value, int) else f"{value:.6f}"

"""The utilization values of a busy or idle GPU.

The load varies in waves, the temperature follows the power, and the clock events are harmless.
"""

import math
from dataclasses import dataclass

from everstep_lab.exporter.gpu import Gpu

IDLE_WATTS, BUSY_WATTS = 70.0, 620.0
CLOCK_IDLE, CLOCK_POWER_CAP = 0x1, 0x4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    percent: int
    sm_clock: int
    watts: float
    celsius: int
    framebuffer_used: int
    millijoules: int
    nvlink_bytes: int
    clock_events: int


def build_load(gpu: Gpu, *, busy: bool, now: float) -> Load:
    """The values depend only on the arguments, so that a page can be reproduced exactly."""
    wave = math.sin(now / 7.0 + gpu.index * 1.7)
    share = (0.9 + 0.08 * wave) if busy else 0.0
    watts = round(IDLE_WATTS + (BUSY_WATTS - IDLE_WATTS) * share + 2.0 * wave, 3)
    up = max(0.0, now - gpu.loaded_at)
    return Load(
        percent=round(100 * share),
        sm_clock=1980 if busy else 345,
        watts=watts,
        celsius=round(35 + 45 * (watts - IDLE_WATTS) / (BUSY_WATTS - IDLE_WATTS)),
        framebuffer_used=52_214 if busy else 0,
        millijoules=round(up * 300_000),
        nvlink_bytes=round(up * 50_000_000),
        clock_events=CLOCK_POWER_CAP if busy else CLOCK_IDLE,
    )

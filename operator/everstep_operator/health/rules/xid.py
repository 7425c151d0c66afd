"""XID errors, from two metrics that may arrive up to three pages apart: a gauge that holds the last
code until a reset or a reboot, and counts over the exporter's window (5 minutes) with the code as
label.

A code that a later one replaces in the gauge has not ended: only a gauge of 0 ends it. dcgm-exporter 4.8.2
leaves the gauge out from its start to the first XID (dcgm-exporter issue 700), where other versions show 0.
"""

from functools import cache

from everstep_operator.health.rules.reading import Change, Reading
from everstep_operator.health.xids import XidTable, find_xid, load_xids

GAUGES = ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR")
"""The second is the name since DCGM 4.6; the exporter prints the one that its CSV file uses."""
COUNT = "DCGM_EXP_XID_ERRORS_COUNT"


def read(reading: Reading) -> Change:
    shown = [int(reading.now[name][0]) for name in GAUGES if name in reading.now]
    before = int(reading.before.get(GAUGES[0], {}).get(0, 0))
    left_out = 0 if before and reading.live else None
    last = max(shown) if shown else left_out
    counts, counted = reading.now.get(COUNT, {}), reading.before.get(COUNT, {})
    risen = {code for code, count in counts.items() if int(count) > int(counted.get(code, 0))}
    if last and last != before:
        risen.add(last)
    ended = [c for c in reading.standing if last == 0 and not int(counts.get(c, 0))]
    kept = {GAUGES[0]: {0: float(before if last is None else last)}, COUNT: counts}
    return Change(risen=risen, ended=ended, kept=kept)


def describe(code: int) -> str | None:
    xid = find_xid(_table(), code)
    return f"reports XID {code} ({xid.meaning})" if xid.convicts else None


@cache
def _table() -> XidTable:
    return load_xids()

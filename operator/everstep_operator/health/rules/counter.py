"""An error counter: a fault when it increases, or is above 0 when first seen. It falls when the
driver is reloaded: earlier errors are then over, and later counts are new.

If several metrics (aliases) report it, the largest value counts.
"""

from everstep_operator.health.rules.reading import Change, Reading

HELD = "held"


def read(reading: Reading) -> Change:
    shown = [value for codes in reading.now.values() for value in codes.values()]
    held = reading.before.get(HELD, {}).get(0, 0.0)
    if not shown:
        return Change(kept={HELD: {0: held}})
    now = max(shown)
    before = held if now >= held else 0.0
    return Change(
        risen=(0,) if now > before else (),
        ended=reading.standing if now < held else (),
        kept={HELD: {0: now}},
    )

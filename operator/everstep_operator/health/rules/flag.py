"""A flag: a fault while it is 1."""

from everstep_operator.health.rules.reading import Change, Reading


def read(reading: Reading) -> Change:
    shown = [value for codes in reading.now.values() for value in codes.values()]
    if not shown:
        return Change()
    if 1 in shown:
        return Change(risen=() if reading.standing else (0,))
    return Change(ended=reading.standing)

"""A lab on a network of its own, beside any other lab that runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everstep_lab import Lab
from everstep_lab.config import LabConfig
from everstep_lab.places import Places

Last = Callable[[Lab], None]
_up: list[tuple[Lab, Last]] = []


@contextmanager
def own_lab(config: LabConfig, network: int | None, last: Last = lambda lab: None) -> Iterator[Lab]:
    """A lab on `network`; None stands for the one that the environment names.

    The environment is not changed, because pytest may end a fixture late: it ends a folder's
    fixture only with the session. So starting the next folder's lab ends the last one. `last` is
    called before a lab ends.
    """
    while _up:
        _end().down()
    lab = Lab(config)
    if network is not None:
        lab.places = Places.from_env({"EVERSTEP_LAB_NETWORK": str(network)})
    with lab:
        _up.append((lab, last))
        try:
            yield lab
        finally:
            if (lab, last) in _up:
                _end()


def _end() -> Lab:
    lab, last = _up.pop()
    last(lab)
    return lab

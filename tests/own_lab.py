"""A lab on its own network, beside any other lab."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everstep_lab import Lab
from everstep_lab.config import LabConfig
from everstep_lab.places import Places

Last = Callable[[Lab], None]
_up: list[tuple[Lab, Last]] = []


@contextmanager
def own_lab(config: LabConfig, network: int | None, last: Last = lambda lab: None) -> Iterator[Lab]:
    """A lab on `network`; None stands for the network that the environment names.

    pytest may end a folder's fixture only at the end of the whole run. So the environment is not
    changed, and the start of the next folder's lab ends the last one. `last` is called before a lab
    ends.
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

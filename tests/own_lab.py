"""A lab on a network of its own, beside whatever other lab runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from everstep_lab import Lab
from everstep_lab.config import LabConfig
from everstep_lab.places import Places

_up: list[Lab] = []


@contextmanager
def own_lab(config: LabConfig, network: int | None) -> Iterator[Lab]:
    """`network` None: the one that the environment names, which stays as it is: pytest may end a fixture late.

    It ends a fixture of a folder with the session, in fact; so the next folder's lab ends the last one.
    """
    while _up:
        _up.pop().down()
    lab = Lab(config)
    if network is not None:
        lab.places = Places.from_env({"EVERSTEP_LAB_NETWORK": str(network)})
    with lab:
        _up.append(lab)
        yield lab

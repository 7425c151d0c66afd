"""The systems that are compared: Everstep and the peers that recover fastest in `bench-recovery`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep_recovery.systems import System, everstep, ft_launcher, torchft
from everstep_storm.faults import MIXES, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    system: System
    proves: bool = False
    """Whether it must end with the state of an undisturbed run, and with a ledger that `everstep
    verify` accepts.
    """
    cannot: Mapping[Kind, str] = field(default_factory=dict)
    """Kind of fault that cannot be tried with it → why."""

    @property
    def title(self) -> str:
        return self.system.title

    def why_not(self, mix: str) -> str:
        """Why this mix cannot be tried with it; empty: it can."""
        return "; ".join(self.cannot[kind] for kind in Kind if kind in self._missing(mix))

    def _missing(self, mix: str) -> set[Kind]:
        return set(MIXES[mix]) & set(self.cannot)


CONTENDERS = (
    Contender(system=System(name="everstep", settings="", command=everstep()), proves=True),
    Contender(
        system=System(
            name="torchft", settings="tight", command=torchft(150, 50, 1000), needs="torchft"
        )
    ),
    Contender(
        system=System(
            name="torchft", settings="as it comes", command=torchft(5000, 100), needs="torchft"
        )
    ),
    Contender(
        system=System(
            name="nvrx",
            settings="ft_launcher",
            command=ft_launcher,
            needs="nvrx",
            environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        ),
        cannot={
            Kind.NODE: "its one launcher starts all ranks, so no node can be lost without all others"
        },
    ),
)

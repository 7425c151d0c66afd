"""The configuration of a run on one machine. Pure."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from everstep_agent.storage.address import Address, file_uri, parse_uri
from everstep_contract.units import ONE_RANK, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    script: str
    args: tuple[str, ...]
    workers: int
    mesh: Mesh = ONE_RANK
    uri: str
    run: str
    save_every: int
    keep: int
    hang_seconds: float = 300.0
    startup_seconds: float = 600.0
    guard_action: str = "Note"
    guard_factor: float = 10.0
    verbose: bool = False
    in_place: bool = True
    zygote: bool = True
    preload: str = ""
    drill: bool = False
    spares: int = 0
    max_redo_seconds: float = 30.0

    @property
    def store_folder(self) -> str:
        """The folder of a store on this machine; empty: it is elsewhere. Raises `BadAddress`."""
        address = self._address
        return address.bucket if address.scheme == "file" else ""

    @property
    def place(self) -> str:
        """Where the run is, as other commands take it. Raises `BadAddress`."""
        return f"{self.store_folder}/{self.run}" if self.store_folder else self._address.uri

    @property
    def _address(self) -> Address:
        return parse_uri(self.uri, self.run)


def build_plan(
    *,
    script: str,
    args: Sequence[str],
    workers: int,
    store: str,
    run: str | None,
    save_every: int,
    keep: int,
    hang_seconds: float,
    startup_seconds: float = 600.0,
    guard_action: str,
    guard_factor: float,
    verbose: bool,
    zygote: bool = True,
    in_place: bool = True,
    preload: str = "",
    drill: bool = False,
    spares: int = 0,
    mesh: Mesh = ONE_RANK,
    max_redo_seconds: float = 30.0,
    folder: str,
) -> Plan:
    """`folder`: base of relative paths."""
    uri = store if "://" in store else file_uri(os.path.abspath(os.path.join(folder, store)))
    return Plan(
        script=os.path.abspath(os.path.join(folder, script)),
        args=tuple(args),
        workers=workers,
        mesh=mesh,
        uri=uri,
        run=run or PurePath(script).stem,
        save_every=save_every,
        keep=keep,
        hang_seconds=hang_seconds,
        startup_seconds=startup_seconds,
        guard_action=guard_action,
        guard_factor=guard_factor,
        verbose=verbose,
        zygote=zygote,
        in_place=in_place,
        preload=preload,
        drill=drill,
        spares=spares,
        max_redo_seconds=max_redo_seconds,
    )


def find_size_problem(workers: int, spares: int, mesh: Mesh) -> str:
    """Which of the two numbers is not a whole number of units, and what to use instead; empty: both
    are.
    """
    given = {"--workers": workers, "--spares": spares}
    told = ((f"{name} {count}", mesh.why_not_whole(count)) for name, count in given.items())
    return next((f"{what} {why}" for what, why in told if why), "")


def describe_size(workers: int, mesh: Mesh) -> str:
    text = "1 worker" if workers == 1 else f"{workers} workers"
    if mesh.unit == 1:
        return text
    units = workers // mesh.unit
    return f"{text} in {units} unit{'s' * (units > 1)} of {mesh.unit} ({mesh})"

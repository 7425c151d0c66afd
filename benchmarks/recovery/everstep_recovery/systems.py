"""The systems that are compared: how each is started, and with which settings."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
Command = Callable[[Path, int], list[str]]
"""(folder of the run, number of ranks) → arguments."""
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
RESTARTS = ("--max-restarts", "1000", "--monitor-interval", "0.1")
"""Options of torchrun, and of the launchers derived from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    name: str
    settings: str
    command: Command
    environ: Mapping[str, str] = field(default_factory=dict)
    never_whole: str = ""
    """Why the group does not return to its full size; a run then ends with the smaller group."""
    never_whole_if_stopped: str = ""
    """The same, only if the fault stops processes and does not end them."""
    one_node: str = ""
    """Why a rank's node cannot be lost alone; such a system does not run the faults of a node."""
    dear: bool = False
    """Left out unless requested, because its runs take the whole time limit."""
    sharded: bool = False
    """Two ranks hold one copy of the model together; these systems have a table of their own."""
    variant: bool = False
    """Left out unless requested: the same system with another internal method."""
    needs: str = ""
    """The virtual environment that it runs in; empty: Everstep's."""

    @property
    def title(self) -> str:
        return f"{self.name} {self.settings}".strip()

    def explain_never_whole(self, *, stops: bool) -> str:
        """Why the group does not return to its full size after a fault; empty if it can.

        Args:
            stops: the fault stops processes and does not end them.
        """
        return self.never_whole or (self.never_whole_if_stopped if stops else "")


def everstep(*options: str) -> Command:
    def command(folder: Path, ranks: int) -> list[str]:
        return [
            sys.executable, "-m", "everstep_agent.cli", "run", "--workers", str(ranks),
            "--store", str(folder / "store"), *options, str(SCRIPTS / "train_everstep.py"),
        ]  # fmt: skip

    return command


def torchrun(script: str) -> Command:
    def command(folder: Path, ranks: int) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS, *RESTARTS,
            "--nproc-per-node", str(ranks), str(SCRIPTS / script),
        ]  # fmt: skip

    return command


def torchft(
    expiry_ms: int, heartbeat_ms: int, collective_ms: int = 5000, shard: int = 1
) -> Command:
    """`collective_ms`: limit of a collective. `shard`: ranks of a replica group, which shard its model."""

    def command(folder: Path, ranks: int) -> list[str]:
        script = str(SCRIPTS / "supervise_torchft.py")
        numbers = map(str, (ranks // shard, expiry_ms, heartbeat_ms, collective_ms, shard))
        return [str(environment("torchft")), script, *numbers]

    return command


def _nvrx(interval_ms: int) -> Command:
    def command(folder: Path, ranks: int) -> list[str]:
        script = str(SCRIPTS / "supervise_nvrx.py")
        return [str(environment("nvrx")), script, str(ranks), str(interval_ms)]

    return command


def ft_launcher(folder: Path, ranks: int) -> list[str]:
    return [
        str(environment("nvrx").with_name("ft_launcher")), *RENDEZVOUS, *RESTARTS,
        "--nproc-per-node", str(ranks), str(SCRIPTS / "train_torchrun.py"),
    ]  # fmt: skip


def _dlrover(folder: Path, ranks: int) -> list[str]:
    return [
        str(environment("dlrover").with_name("dlrover-run")), "--standalone", "--nnodes", "1",
        *RESTARTS, "--nproc-per-node", str(ranks), str(SCRIPTS / "train_torchrun.py"),
    ]  # fmt: skip


def environment(name: str) -> Path:
    """The interpreter of a peer's own virtual environment (`environments.py` makes it)."""
    return Path("build/bench/env", name, "bin", "python").absolute()


SHARDED = {"EVERSTEP_RECOVERY_SHARD": "2"}
NO_NEW = "takes in no new process"
ENDED_ONLY = "only a process that has ended is replaced"
ONE_LAUNCHER = "one launcher starts all ranks, and would be lost with the node"
SYSTEMS = (
    System(name="everstep", settings="in place", command=everstep()),
    System(
        name="everstep",
        settings="in place, preloaded",
        command=everstep("--preload", "everstep_recovery.workload"),
    ),
    System(
        name="everstep",
        settings="in place, reconfigure",
        command=everstep(),
        environ={"EVERSTEP_GROUP_FORMING": "reconfigure"},
        variant=True,
    ),
    System(name="everstep", settings="in place, no zygote", command=everstep("--no-zygote")),
    System(name="everstep", settings="restart", command=everstep("--no-in-place")),
    System(
        name="torchrun",
        settings="own store",
        command=torchrun("train_torchrun.py"),
        one_node=ONE_LAUNCHER,
        # With its shared store, as shipped in torch 2.15, a restarted group hangs.
        environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    System(
        name="torchrun",
        settings="as shipped",
        command=torchrun("train_torchrun.py"),
        one_node=ONE_LAUNCHER,
        dear=True,
    ),
    System(
        name="nvrx",
        settings="ft_launcher",
        command=ft_launcher,
        one_node=ONE_LAUNCHER,
        needs="nvrx",
        environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    System(name="nvrx", settings="in process", command=_nvrx(0), needs="nvrx", never_whole=NO_NEW),
    System(
        name="nvrx",
        settings="in process, tight",
        command=_nvrx(50),
        needs="nvrx",
        never_whole=NO_NEW,
    ),
    System(
        name="dlrover",
        settings="dlrover-run",
        command=_dlrover,
        one_node=ONE_LAUNCHER,
        needs="dlrover",
    ),
    System(
        name="torchft",
        settings="as it comes",
        command=torchft(5000, 100),
        needs="torchft",
        never_whole_if_stopped=ENDED_ONLY,
    ),
    System(
        name="torchft",
        settings="tight",
        command=torchft(150, 50),
        needs="torchft",
        never_whole_if_stopped=ENDED_ONLY,
    ),
    System(
        name="everstep",
        settings="in place, shard=2",
        command=everstep("--mesh", "shard=2"),
        environ=SHARDED,
        sharded=True,
    ),
    System(
        name="torchft",
        settings="HSDP as it comes",
        command=torchft(5000, 100, shard=2),
        environ=SHARDED,
        needs="torchft",
        sharded=True,
    ),
    System(
        name="torchft",
        settings="HSDP tight",
        command=torchft(150, 50, shard=2),
        environ=SHARDED,
        needs="torchft",
        sharded=True,
    ),
    System(
        name="torchrun",
        settings="HSDP own store",
        command=torchrun("train_torchrun_hsdp.py"),
        one_node=ONE_LAUNCHER,
        environ={**SHARDED, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        sharded=True,
    ),
)


def build_environ(system: System, out: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run.

    Compiled bytecode is kept, because otherwise each restart would compile torch again.
    """
    path = os.pathsep.join([str(SCRIPTS.parent.parent), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **system.environ, **out}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ

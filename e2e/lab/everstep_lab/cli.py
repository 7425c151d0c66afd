"""`everstep-lab`: a Kubernetes cluster with simulated GPU nodes, on this machine."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from everstep_lab import build, present
from everstep_lab.client import Lab
from everstep_lab.config import KIND_GRACE_SECONDS, KIND_NODES, LabConfig
from everstep_lab.kind.client import KindLab
from everstep_lab.kind.present import render_kind_status, render_kind_up
from everstep_lab.places import Places
from everstep_lab.seam import FaultRequest, LabError, RunningLab


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        if arguments[:1] == ["kubectl"]:
            return _kubectl(arguments[1:])
        parsed = _parser().parse_args(arguments)
        return int(parsed.run(parsed))
    except LabError as error:
        print(f"everstep-lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _up(parsed: argparse.Namespace) -> int:
    config = LabConfig(
        nodes=_node_count(parsed),
        gpus_per_node=parsed.gpus_per_node,
        kubeconfig=str(Path(parsed.kubeconfig).absolute()) if parsed.kubeconfig else "",
        operator=not parsed.no_operator,
        operator_args=tuple(parsed.operator_arg),
        node_grace_seconds=_grace_seconds(parsed),
        seed=parsed.seed,
    )
    if parsed.kind:
        return _up_kind(config, parsed)
    lab = Lab(config, say=_say, lasting=not parsed.foreground)
    if parsed.foreground:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        lab.up()
        print(present.render_up(lab.described), flush=True)
        if parsed.foreground:
            print("Press Ctrl-C to end the lab.", flush=True)
            _until_gone(lab)
    finally:
        if parsed.foreground and lab.described:
            print(lab.down())
    return 0


def _node_count(parsed: argparse.Namespace) -> int:
    if parsed.nodes is not None:
        return int(parsed.nodes)
    return KIND_NODES if parsed.kind else LabConfig().nodes


def _grace_seconds(parsed: argparse.Namespace) -> int:
    if parsed.node_grace_seconds is not None:
        return int(parsed.node_grace_seconds)
    return KIND_GRACE_SECONDS if parsed.kind else LabConfig().node_grace_seconds


def _up_kind(config: LabConfig, parsed: argparse.Namespace) -> int:
    if parsed.foreground:
        raise LabError("--foreground does not work with --kind: a kind cluster stays until `down`")
    lab = KindLab(config, say=_say)
    lab.up()
    print(render_kind_up(lab.described), flush=True)
    return 0


def _lab() -> RunningLab:
    """The running lab; if both kinds run, the one that EVERSTEP_LAB names."""
    local = Places.from_env(os.environ).socket.exists()
    chosen = os.environ.get("EVERSTEP_LAB", "")
    if chosen not in ("", "kind", "local"):
        raise LabError(f"EVERSTEP_LAB={chosen}: expected kind or local")
    if not chosen and local and KindLab.exists():
        raise LabError("two labs run: choose one with EVERSTEP_LAB=kind or EVERSTEP_LAB=local")
    if chosen == "kind" or (not chosen and KindLab.exists()):
        return KindLab.running()
    return Lab()


def _until_gone(lab: Lab) -> None:
    while True:
        time.sleep(1.0)
        try:
            lab.status()
        except LabError as error:
            raise LabError(f"the lab has ended: {error}") from None


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, flush=True)


def _build(options: argparse.Namespace) -> int:
    build.ensure_all((build.CONTROL_PLANE, build.OBJECT_STORE), _say)
    if options.helm:
        build.ensure_helm(_say)
    return 0


def _status(_: argparse.Namespace) -> int:
    lab = _lab()
    status = lab.status()
    print(render_kind_status(status) if isinstance(lab, KindLab) else present.render_status(status))
    return 0


def _down(parsed: argparse.Namespace) -> int:
    print(KindLab().down() if parsed.kind else _lab().down())
    return 0


def _fault(parsed: argparse.Namespace) -> int:
    if (parsed.xid is None) != (parsed.gpu is None):
        raise LabError("--gpu and --xid go together: `everstep-lab fault node-2 --gpu 0 --xid 79`")
    request = FaultRequest(**{f.name: getattr(parsed, f.name) for f in fields(FaultRequest)})
    if request.xid is None and not (request.exporter or request.asks_for_node):
        raise LabError(
            "no fault is named: give --gpu N --xid CODE, --exporter MODE, --kill-node, --partition or --freeze-node"
        )
    print(_lab().fault(parsed.node, **asdict(request)))
    return 0


def _heal(parsed: argparse.Namespace) -> int:
    print(_lab().heal(parsed.node))
    return 0


def _operator(parsed: argparse.Namespace) -> int:
    lab = _lab()
    if isinstance(lab, KindLab):
        return _operate_kind(lab, parsed)
    if parsed.action == "logs":
        follow = ["-f"] if parsed.follow else []
        log = Path(lab.status()["operator"]["log"])
        if not log.exists():
            raise LabError("the operator has not run yet: `everstep-lab operator start`")
        return subprocess.call(["tail", "-n", "+1", *follow, str(log)])
    print(_operate(lab, parsed.action))
    return 0


def _operate_kind(lab: KindLab, parsed: argparse.Namespace) -> int:
    if parsed.action != "logs":
        print(_operate(lab, parsed.action))
        return 0
    if parsed.follow:
        return _kubectl(lab.follow_operator)
    print(lab.operator_logs(), end="")
    return 0


def _operate(lab: RunningLab, action: str) -> str:
    actions = {
        "start": lab.operator_start, "stop": lab.operator_stop,
        "restart": lab.operator_restart, "kill": lab.operator_kill,
    }  # fmt: skip
    return actions[action]()


def _objectstore(parsed: argparse.Namespace) -> int:
    lab = _lab()
    print(lab.objectstore_stop() if parsed.action == "stop" else lab.objectstore_start())
    return 0


def _kubectl(arguments: Sequence[str]) -> int:
    lab = _lab()
    binary = lab.status()["kubectl"] if isinstance(lab, Lab) else lab.described["kubectl"]
    os.environ["KUBECONFIG"] = str(lab.kubeconfig)
    os.execv(binary, [binary, *arguments])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep-lab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands.add_parser("up", help="start the lab; builds its binaries the first time"))
    ahead = commands.add_parser("build", help="only build the lab's binaries")
    ahead.add_argument(
        "--helm", action="store_true", help="also helm, if there is none on the PATH"
    )
    ahead.set_defaults(run=_build)
    fault = commands.add_parser("fault", help="break a GPU, an exporter or a node")
    fault.add_argument("node", metavar="NODE", help="name of the node, such as node-2")
    fault.add_argument("--gpu", type=int, metavar="N", help="index of the GPU, from 0")
    fault.add_argument("--xid", type=int, metavar="CODE", help="NVIDIA XID, such as 79 or 64")
    fault.add_argument(
        "--exporter", metavar="MODE", help="one of silent, hang, http500, empty, frozen"
    )
    fault.add_argument(
        "--kill-node", action="store_true", help="power loss: all processes of the node end at once"
    )
    fault.add_argument(
        "--partition", action="store_true", help="cut the node off from the API server only"
    )
    fault.add_argument(
        "--freeze-node",
        action="store_true",
        help="freeze all processes of the node until `heal` (kind)",
    )
    fault.set_defaults(run=_fault)
    heal = commands.add_parser("heal", help="undo a node's faults, like a repair and a reboot")
    heal.add_argument("node", metavar="NODE", help="name of the node")
    heal.set_defaults(run=_heal)
    status = commands.add_parser("status", help="show processes, nodes and injected faults")
    status.set_defaults(run=_status)
    down = commands.add_parser("down", help="end the lab and remove its files")
    down.add_argument(
        "--kind", action="store_true", help="the lab on kind, also if `up` was interrupted"
    )
    down.set_defaults(run=_down)
    commands.add_parser(
        "kubectl", help="run kubectl against the lab: everstep-lab kubectl get nodes"
    )
    operator = commands.add_parser(
        "operator", help="start, stop or kill the operator, show its log"
    )
    operator.add_argument(
        "action", choices=("start", "stop", "restart", "kill", "logs"), help="what to do with it"
    )
    operator.add_argument(
        "-f", "--follow", action="store_true", help="with logs: go on showing new lines"
    )
    operator.set_defaults(run=_operator)
    store = commands.add_parser(
        "objectstore", help="stop or start the S3 server; its data are kept"
    )
    store.add_argument("action", choices=("stop", "start"), help="what to do with it")
    store.set_defaults(run=_objectstore)
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    default = LabConfig()
    up.add_argument("--kind", action="store_true", help="create it on kind: needs docker and kind")
    up.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help=f"number of nodes (default {default.nodes}; with --kind {KIND_NODES})",
    )
    up.add_argument(
        "--gpus-per-node",
        type=int,
        default=default.gpus_per_node,
        metavar="N",
        help=f"number of GPUs of each node (default {default.gpus_per_node})",
    )
    up.add_argument("--kubeconfig", metavar="FILE", help="also write the kubeconfig to this file")
    up.add_argument(
        "--no-operator",
        action="store_true",
        help="do not start the operator (`everstep-lab operator start` does)",
    )
    up.add_argument(
        "--operator-arg", action="append", default=[], metavar="FLAG",
        help="an additional flag for the operator, such as --operator-arg=--cordon-budget=2; may be repeated "
        "(default none)",
    )  # fmt: skip
    up.add_argument(
        "--foreground", action="store_true", help="stay in the foreground; Ctrl-C ends the lab"
    )
    up.add_argument(
        "--node-grace-seconds", type=int, metavar="S",
        help="a node without heartbeats becomes NotReady after this time "
        f"(default {default.node_grace_seconds}; with --kind {KIND_GRACE_SECONDS}; Kubernetes: 50)",
    )  # fmt: skip
    up.add_argument(
        "--seed",
        type=int,
        default=default.seed,
        metavar="N",
        help=f"seed of UUIDs and random delays (default {default.seed})",
    )
    up.set_defaults(run=_up)


if __name__ == "__main__":
    sys.exit(main())

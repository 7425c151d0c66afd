"""`everstep-lab`: a Kubernetes cluster with simulated GPU nodes, on this machine."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everstep_lab import build, present
from everstep_lab.client import Lab
from everstep_lab.config import LabConfig
from everstep_lab.seam import LabError


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
        nodes=parsed.nodes,
        gpus_per_node=parsed.gpus_per_node,
        kubeconfig=str(Path(parsed.kubeconfig).absolute()) if parsed.kubeconfig else "",
        operator=not parsed.no_operator,
        operator_args=tuple(parsed.operator_arg),
        node_grace_seconds=parsed.node_grace_seconds,
        seed=parsed.seed,
    )
    lab = Lab(config, say=_say, lasting=not parsed.foreground)
    if parsed.foreground:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        lab.up()
        print(present.render_up(lab.described), flush=True)
        if parsed.foreground:
            print("Ctrl-C ends the lab.", flush=True)
            _until_gone(lab)
    finally:
        if parsed.foreground and lab.described:
            print(lab.down())
    return 0


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


def _build(_: argparse.Namespace) -> int:
    for module in (build.CONTROL_PLANE, build.OBJECT_STORE):
        build.ensure(module, _say)
    build.ensure_helm(_say)
    return 0


def _status(_: argparse.Namespace) -> int:
    print(present.render_status(Lab.running().described))
    return 0


def _down(_: argparse.Namespace) -> int:
    print(Lab().down())
    return 0


def _fault(parsed: argparse.Namespace) -> int:
    if (parsed.xid is None) != (parsed.gpu is None):
        raise LabError("--gpu and --xid go together: `everstep-lab fault node-2 --gpu 0 --xid 79`")
    if parsed.xid is None and not (parsed.exporter or parsed.kill_node or parsed.partition):
        raise LabError("which fault? --gpu N --xid CODE, --exporter MODE, --kill-node, --partition")
    fields = {k: getattr(parsed, k) for k in ("gpu", "xid", "exporter", "kill_node", "partition")}
    print(Lab().fault(parsed.node, **fields))
    return 0


def _heal(parsed: argparse.Namespace) -> int:
    print(Lab().heal(parsed.node))
    return 0


def _operator(parsed: argparse.Namespace) -> int:
    lab = Lab()
    if parsed.action == "logs":
        follow = ["-f"] if parsed.follow else []
        log = Path(lab.status()["operator"]["log"])
        if not log.exists():
            raise LabError("the operator has not run yet: `everstep-lab operator start`")
        return subprocess.call(["tail", "-n", "+1", *follow, str(log)])
    print(lab.ask({"do": "operator", "action": parsed.action}))
    return 0


def _objectstore(parsed: argparse.Namespace) -> int:
    print(Lab().ask({"do": "objectstore", "action": parsed.action}))
    return 0


def _kubectl(arguments: Sequence[str]) -> int:
    lab = Lab.running()
    binary = lab.described["kubectl"]
    os.environ["KUBECONFIG"] = str(lab.kubeconfig)
    os.execv(binary, [binary, *arguments])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep-lab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands.add_parser("up", help="start it; builds its binaries the first time"))
    ahead = commands.add_parser("build", help="build its binaries, for later; nothing is started")
    ahead.set_defaults(run=_build)
    fault = commands.add_parser("fault", help="break a GPU, an exporter or a node")
    fault.add_argument("node", metavar="NODE")
    fault.add_argument("--gpu", type=int, metavar="N", help="index of the GPU, from 0")
    fault.add_argument("--xid", type=int, metavar="CODE", help="NVIDIA XID, such as 79 or 64")
    fault.add_argument("--exporter", metavar="MODE", help="silent, hang, http500, empty, frozen")
    fault.add_argument("--kill-node", action="store_true", help="all of it dies at once")
    fault.add_argument("--partition", action="store_true", help="cut off from the API server only")
    fault.set_defaults(run=_fault)
    heal = commands.add_parser("heal", help="undo a node's faults, as a repair and a reboot would")
    heal.add_argument("node", metavar="NODE")
    heal.set_defaults(run=_heal)
    status = commands.add_parser("status", help="what runs, and what is broken on purpose")
    status.set_defaults(run=_status)
    down = commands.add_parser("down", help="end it; leaves nothing behind")
    down.set_defaults(run=_down)
    commands.add_parser("kubectl", help="kubectl against the lab: everstep-lab kubectl get nodes")
    operator = commands.add_parser("operator", help="the operator's process")
    operator.add_argument("action", choices=("start", "stop", "restart", "kill", "logs"))
    operator.add_argument("-f", "--follow", action="store_true", help="with logs")
    operator.set_defaults(run=_operator)
    store = commands.add_parser("objectstore", help="the S3 server's process; data stay")
    store.add_argument("action", choices=("stop", "start"))
    store.set_defaults(run=_objectstore)
    return parser


def _add_up(up: argparse.ArgumentParser) -> None:
    default = LabConfig()
    up.add_argument("--nodes", type=int, default=default.nodes, metavar="N")
    up.add_argument("--gpus-per-node", type=int, default=default.gpus_per_node, metavar="N")
    up.add_argument("--kubeconfig", metavar="FILE", help="write the kubeconfig here too")
    up.add_argument(
        "--no-operator", action="store_true", help="`everstep-lab operator start` later"
    )
    up.add_argument(
        "--operator-arg", action="append", default=[], metavar="FLAG",
        help="a further flag of the operator: --operator-arg=--cordon-budget=2",
    )  # fmt: skip
    up.add_argument("--foreground", action="store_true", help="stay; Ctrl-C ends the lab")
    up.add_argument(
        "--node-grace-seconds", type=int, default=default.node_grace_seconds, metavar="S",
        help="a silent node counts as lost after this time (default %(default)s; Kubernetes: 50)",
    )  # fmt: skip
    up.add_argument("--seed", type=int, default=default.seed, metavar="N", help="of what is drawn")
    up.set_defaults(run=_up)


if __name__ == "__main__":
    sys.exit(main())

"""Validates fault requests, and describes the exporter modes."""

from everstep_lab.exporter.server import MODES
from everstep_lab.seam import BadRequestError, FaultRequest

EXPORTER_MODES = {"silent": "refused", **{mode: mode for mode in MODES}}
EXPORTER_EFFECTS = {
    "ok": "exporter answers",
    "refused": "exporter refuses connections",
    "hang": "exporter accepts connections and never answers",
    "http500": "exporter answers with HTTP 500",
    "empty": "exporter answers with an empty page",
    "frozen": "exporter repeats the same values",
}


def check_request(node: str, gpus: int, request: FaultRequest) -> None:
    """Raise `BadRequestError` for a bad request. It names the bad value and the possible ones."""
    if request.exporter is not None and request.exporter not in EXPORTER_MODES:
        modes = ", ".join(EXPORTER_MODES)
        raise BadRequestError(f"exporter {request.exporter!r}: choose one of {modes}")
    if request.gpu is not None and not 0 <= request.gpu < gpus:
        raise BadRequestError(f"{node} has no GPU {request.gpu}: it has 0 to {gpus - 1}")
    if request.xid is not None and not gpus:
        raise BadRequestError(f"{node} has no GPU; start the lab with some")
    if request.xid is None and request.exporter is None:
        if request.gpu is not None:
            raise BadRequestError(f"GPU {request.gpu}: name the fault with --xid CODE")
        if not request.asks_for_node:
            raise BadRequestError(
                "no fault is named: give --gpu and --xid, --exporter, --kill-node, --partition or --freeze-node"
            )

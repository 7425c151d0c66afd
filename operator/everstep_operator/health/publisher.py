"""Findings and quarantines → the verdicts for the jobs, the metrics and the log."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from everstep_operator.fleet.memory import FleetMemory
from everstep_operator.health.examiner import Examiner
from everstep_operator.health.metrics import HealthMetrics
from everstep_operator.health.starts import StartFailures
from everstep_operator.health.verdicts import build_held, choose_verdicts
from everstep_operator.health_seam import Verdicts
from everstep_operator.roster import LiveRoster
from everstep_operator.values import NodeVerdict

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources of verdicts besides the quarantines."""

    roster: LiveRoster
    examiner: Examiner
    start_failures: StartFailures


class Publisher:
    def __init__(self, board: Verdicts, metrics: HealthMetrics) -> None:
        self._board, self._metrics = board, metrics
        self._published: Mapping[str, NodeVerdict] = {}
        self._decided_at: Mapping[str, float] = {}

    def publish(self, sources: Sources, memory: FleetMemory, now: float) -> None:
        held = replace(
            build_held(memory),
            decided_at=self._decided_at,
            start_failures=sources.start_failures.count(),
        )
        examiner = sources.examiner
        verdicts = choose_verdicts(sources.roster.now, examiner.findings, held, now)
        self._decided_at = {
            v.incident: v.marks["verdict"] for v in verdicts.values() if "verdict" in v.marks
        }
        if verdicts != self._published:
            self._metrics.note_verdicts(verdicts)
        for node in sorted({*verdicts, *self._published}):
            _log_change(node, self._published.get(node), verdicts.get(node))
        self._published = verdicts
        self._board.publish(verdicts, examiner.judged_at)


def _log_change(node: str, old: NodeVerdict | None, new: NodeVerdict | None) -> None:
    if new is None:
        log.info("node %s: no verdict any more (was %s)", node, old.state.value if old else "")
    elif old is None or old.state is not new.state or old.incident != new.incident:
        text = f"{new.state.value}: {new.reason}: {new.message}"
        log.warning("%s%s", text, f" [{new.incident}]" if new.incident else "")

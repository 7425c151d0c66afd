"""The fleet pass around its plan: what it reads, remembers and writes."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from everstep_contract import names
from everstep_operator import kube
from everstep_operator.evidence import from_rfc3339
from everstep_operator.fleet import apply, release
from everstep_operator.fleet.actions import Action, Tell
from everstep_operator.fleet.memory import FleetMemory, with_deleted, with_refused
from everstep_operator.fleet.observed import SERVED, Definition, Findings, Observed, Policy
from everstep_operator.fleet.observing import plan_observing
from everstep_operator.fleet.plan import Plan, plan
from everstep_operator.kube import Kube
from everstep_operator.logs import OnChange
from everstep_operator.quarantines import (
    Quarantine,
    QuarantineError,
    build_object,
    rename_evidence,
    to_quarantine,
)
from everstep_operator.roster import Roster

QUARANTINE_CRD = f"{names.QUARANTINE_PLURAL}.{names.GROUP}"

log = logging.getLogger(__name__)


class FleetPasses:
    """`nodes` writes nodes and NodeQuarantines, and reads their CRD; `port` lists NodeQuarantines
    and writes Events.
    """

    def __init__(
        self,
        port: Kube,
        nodes: Kube,
        policy: Policy,
        said: OnChange,
        clock: Callable[[], float],
    ) -> None:
        self._port, self._nodes, self._policy, self._said = port, nodes, policy, said
        self._clock = clock
        self._plan = plan_observing if policy.observe_only else plan
        self._told: dict[Tell, float] = {}
        """What is reported and was in the last plan, too → when it was last written."""
        self.memory = FleetMemory()
        self._listed = False
        """NodeQuarantines have been listed once, or their kind does not exist."""
        self.planned = False
        """A pass has been planned since then. Before that, `memory` may lack quarantines, and may
        hold some that the former leader has released.
        """

    def note_deleted(self, quarantine: Mapping[str, Any]) -> None:
        """Record a deleted quarantine: it existed until now, even if it appeared and vanished
        between two passes.
        """
        try:
            self.memory = with_deleted(self.memory, to_quarantine(quarantine))
        except QuarantineError as error:
            log.warning("%s", error)

    async def observe(self, roster: Roster, findings: Findings) -> Observed:
        listed, unread, unreadable = await self._list()
        definition = SERVED
        if listed is not None and release.find_absent(roster, listed, unread, self.memory):
            definition = await self._look_at_definition()
        return Observed(
            roster=roster,
            quarantines=None if listed is None else rename_evidence(listed, roster.nodes),
            unreadable=unreadable,
            known=self._listed,
            unread=unread,
            definition=definition,
            findings=findings,
        )

    def plan(self, observed: Observed, now: float) -> Plan:
        planned = self._plan(observed, self.memory, self._policy, now)
        self.memory, self.planned = planned.memory, self._listed
        return planned

    async def apply(self, planned: Plan, now: float) -> apply.Outcome:
        actions = self._without_repeats(planned.actions, now)
        outcome = await apply.apply_plan(self._nodes, actions, now, self._port)
        self._told |= dict.fromkeys(outcome.told, now)
        self.memory = with_refused(self.memory, outcome.refused, now)
        return outcome

    def _without_repeats(self, actions: Iterable[Action], now: float) -> list[Action]:
        """Drops messages that were reported and have been planned ever since, unless their Events
        may end soon.
        """
        actions, told = list(actions), self._told
        planned = [a for a in actions if isinstance(a, Tell)]
        self._told = {
            a: told[a] for a in planned if a in told and now - told[a] < apply.REPEAT_SECONDS
        }
        return [a for a in actions if not isinstance(a, Tell) or a not in self._told]

    async def _list(self) -> tuple[tuple[Quarantine, ...] | None, dict[str, str], str]:
        """The quarantines as the API server lists them: a stale mirror must not decide whether one
        is absent. With them, those that cannot be read, and their nodes. If they cannot be listed:
        None and the reason.
        """
        try:
            objects, _ = await self._port.list(kube.QUARANTINES)
        except kube.KubeError as error:
            self._listed |= isinstance(error, kube.Gone)
            return None, {}, f"{type(error).__name__}: {error.message}"
        self._listed = True
        found: list[Quarantine] = []
        unread: dict[str, str] = {}
        words: dict[str, str] = {}
        for obj in objects:
            name = obj["metadata"]["name"]
            try:
                found.append(to_quarantine(obj))
            except QuarantineError as error:
                unread[name] = str((obj.get("spec") or {}).get("nodeName", ""))
                words[f"quarantine {name}"] = f"cannot be read, its node stays as it is: {error}"
        self._said.say_all("quarantine ", words)
        return tuple(found), unread, ""

    async def _look_at_definition(self) -> Definition:
        creatable = await self._is_creatable()
        try:
            found = await self._nodes.get(kube.DEFINITIONS, QUARANTINE_CRD)
        except kube.KubeError as error:
            self._said.say("definition", f"{QUARANTINE_CRD} cannot be read: {error.message}")
            return Definition(creatable=creatable)
        self._said.forget("definition")
        metadata = found["metadata"]
        return Definition(
            creatable=creatable and "deletionTimestamp" not in metadata,
            created_at=from_rfc3339(metadata["creationTimestamp"]),
        )

    async def _is_creatable(self) -> bool:
        """While a CRD is being deleted, its objects vanish one by one and none can be created."""
        probe = build_object(release.build_probe(self._clock()))
        try:
            await self._nodes.create(kube.QUARANTINES, probe, dry_run=True)
        except kube.AlreadyExists:
            return True
        except kube.KubeError as error:
            self._said.say("probe", f"no NodeQuarantine could be created now: {error.message}")
            return False
        self._said.forget("probe")
        return True

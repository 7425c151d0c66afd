"""The findings of all nodes, updated node by node.

After a round of scrapes every watched node is examined, because a finding can also change with
time alone (a silence, the end of a doubt). Between two rounds only nodes with news are examined.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from everstep_operator.evidence import Finding
from everstep_operator.fleet.observed import Findings, shows_more, tells
from everstep_operator.health.decide import decide_node
from everstep_operator.health.outcomes import Scrape
from everstep_operator.health.rules.registry import Rules
from everstep_operator.health.signals import Limits, NodeMemory, remember
from everstep_operator.nodes import NodeFacts

Nodes = Mapping[str, NodeFacts]


class Examiner:
    """`now`: seconds since the Unix epoch, the operator's clock."""

    def __init__(self, rules: Rules, limits: Limits) -> None:
        self._rules, self._limits = rules, limits
        self.memories: dict[str, NodeMemory] = {}
        self._died_at: dict[str, float] = {}
        self._found: dict[str, Finding] = {}
        self._telling: set[str] = set()
        self._unlisted: set[str] = set()
        self.judged_at: Mapping[str, float] = {}
        """Node → the earliest time (monotonic clock) at which the values behind its last judgment
        were sampled.
        """

    @property
    def findings(self) -> Findings:
        return Findings(by_node=self._found, telling=self._telling, unlisted=self._unlisted)

    def hear(self, scrapes: Iterable[Scrape], nodes: Nodes) -> list[Scrape]:
        """Return the scrapes as they count: a page that shows no GPU of a node with GPUs is a failure."""
        return [self._hear(scrape, nodes.get(scrape.node)) for scrape in scrapes]

    def _hear(self, scrape: Scrape, facts: NodeFacts | None) -> Scrape:
        if facts is None:
            return scrape
        held = self.memories.get(scrape.node, NodeMemory())
        memory = remember(held, scrape, facts, self._rules, self._limits)
        self.memories[scrape.node] = memory
        return replace(scrape, outcome=memory.failure or scrape.outcome)

    def note_death(self, node: str, now: float) -> bool:
        """Record a rank's death; return whether the node is watched, so that a later page can
        explain the death.
        """
        memory = self.memories.get(node)
        if memory is None or memory.last_good is None:
            return False
        self._died_at[node] = now
        return True

    def examine_all(self, nodes: Nodes, now: float) -> None:
        self.examine(list(self.memories), nodes, now)
        sampled = ((name, memory.sampled_steady) for name, memory in self.memories.items())
        self.judged_at = {name: at for name, at in sampled if at is not None}

    def examine(self, names: Iterable[str], nodes: Nodes, now: float) -> None:
        for name in names:
            facts, memory = nodes.get(name), self.memories.get(name)
            if facts is None:
                self._forget(name)
            elif memory is not None:
                self._note(self._decide(memory, facts, now), facts)

    def _decide(self, memory: NodeMemory, facts: NodeFacts, now: float) -> Finding:
        died_at = self._died_at.get(facts.name)
        if died_at is not None and abs(now - died_at) > self._limits.doubt:
            del self._died_at[facts.name]
        return decide_node(
            memory, facts, rules=self._rules, limits=self._limits, now=now, died_at=died_at
        )

    def _note(self, finding: Finding, facts: NodeFacts) -> None:
        self._found[facts.name] = finding
        self._telling.discard(facts.name)
        self._unlisted.discard(facts.name)
        if tells(finding):
            self._telling.add(facts.name)
        if shows_more(finding, facts):
            self._unlisted.add(facts.name)

    def _forget(self, name: str) -> None:
        for held in (self.memories, self._died_at, self._found):
            held.pop(name, None)
        self._telling.discard(name)
        self._unlisted.discard(name)

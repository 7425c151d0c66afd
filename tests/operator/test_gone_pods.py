"""Which pods of a node are gone after it lost a GPU, and how long that verdict holds."""

from dataclasses import replace

from everstep_operator.evidence import Finding
from everstep_operator.quarantines import Quarantine, build_object, conclude, to_quarantine
from everstep_operator.values import GonePods, NodeState
from health_given import HEALTHY, NODE, A, B, History, a_gpu, a_node, a_page

ONE, TWO = "team/lm-0-1", "team/lm-1-1"
BOTH_HELD = a_page(a_gpu(A, pods=frozenset({ONE})), a_gpu(B, pods=frozenset({TWO})))
ONLY_B_HELD = a_page(a_gpu(A), a_gpu(B, pods=frozenset({TWO})))
LOST = a_page(a_gpu(B, pods=frozenset({TWO})))
NOTHING_SEEN = Finding(node=NODE)


def a_quarantine(finding: Finding, **changes: object) -> Quarantine:
    start = Quarantine(
        name="q", node=NODE, machine="machine-1", incident="inc-1", verdict=NodeState.LEAVING,
        reason="GpuMissing", message="m", cordon=True, decided_at=1.0, evidence=(),
    )  # fmt: skip
    verdict, gone_pods = conclude(start, finding)
    evidence = tuple(claim.evidence for claim in finding.convicting)
    written = replace(start, verdict=verdict, gone_pods=gone_pods, evidence=evidence)
    return to_quarantine(build_object(replace(written, **changes)))  # type: ignore[arg-type]


def test_the_holder_of_the_lost_gpu_is_gone_and_its_neighbour_is_not() -> None:
    held = a_quarantine(History().scrape(BOTH_HELD, *[LOST] * 3).finding())
    assert held.gone_pods == GonePods(holders=(ONE,))
    assert (held.gone_pods.includes(ONE), held.gone_pods.includes(TWO)) == (True, False)


def test_the_loss_of_an_idle_gpu_spares_the_pod_on_the_other_one() -> None:
    held = a_quarantine(History().scrape(ONLY_B_HELD, *[LOST] * 3).finding())
    assert held.gone_pods == GonePods(spared=(TWO,))
    assert (held.gone_pods.includes("team/new"), held.gone_pods.includes(TWO)) == (True, False)


def test_an_exporter_that_names_no_pods_condemns_them_all() -> None:
    held = a_quarantine(History().scrape(HEALTHY, *[a_page(a_gpu(B))] * 3).finding())
    assert held.gone_pods.includes(ONE)
    assert held.gone_pods.includes(TWO)


def test_with_every_gpu_lost_nobody_is_spared() -> None:
    bare = History(facts=a_node(allocatable=0)).scrape(ONLY_B_HELD, *[a_page()] * 61)
    assert a_quarantine(bare.finding()).gone_pods.includes(TWO)


def test_the_conclusion_stands_for_a_leader_that_has_seen_nothing_or_less() -> None:
    held = a_quarantine(History().scrape(BOTH_HELD, *[LOST] * 3).finding())
    assert conclude(held, NOTHING_SEEN) == (NodeState.GONE, held.gone_pods)
    later = History().scrape(BOTH_HELD, *[a_page(a_gpu(B))] * 3).finding()
    unknown = replace(later, claims=tuple(replace(c, pods=()) for c in later.claims))
    assert conclude(held, unknown) == (NodeState.GONE, held.gone_pods)


def test_the_loss_of_a_further_gpu_adds_its_holder() -> None:
    history = History().scrape(BOTH_HELD, *[LOST] * 3)
    held = a_quarantine(history.finding())
    history.facts = a_node(allocatable=0)
    worse = history.scrape(*[a_page()] * 61).finding()
    assert conclude(held, worse) == (NodeState.GONE, GonePods(holders=(ONE, TWO)))


def test_the_loss_of_a_further_gpu_of_unknown_holder_spares_only_those_who_are_neither() -> None:
    held = a_quarantine(History().scrape(BOTH_HELD, *[LOST] * 3).finding())
    spared = GonePods(spared=(ONE, TWO))
    idle = replace(held, gone_pods=spared, evidence=())
    finding = History().scrape(BOTH_HELD, *[LOST] * 3).finding()
    assert conclude(idle, finding) == (NodeState.GONE, GonePods(spared=(TWO,)))

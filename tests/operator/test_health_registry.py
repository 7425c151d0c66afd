"""A rule is a file and a line of `rules.csv`. A rule added from outside can convict a node as well."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep_operator.health import loop, rules
from everstep_operator.health.rules.registry import COLUMNS, RuleError, load_rules
from everstep_operator.values import NodeState
from health_rig import Rig, a_page, a_rig

SHIPPED = (Path(rules.__file__).parent / "rules.csv").read_text()
LOGIC = '''
"""NVLink retraining: at fault from the third replay on."""

from everstep_operator.health.rules.reading import Change


def read(reading):
    links = {link for codes in reading.now.values() for link, count in codes.items() if count >= 3}
    return Change(risen=links - set(reading.standing), ended=set(reading.standing) - links)


def describe(link):
    return f"replays on NVLink {link}"
'''
LINE = "nvlink-replays,replays,DCGM_NVLINK_REPLAYS/nvlink,GpuLinkReplays,{verdict},no,replays\n"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with a_rig() as made:
        yield made


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "replays.py").write_text(LOGIC)
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])


def with_rule(rig: Rig, monkeypatch: pytest.MonkeyPatch, verdict: str) -> None:
    text = SHIPPED + LINE.format(verdict=verdict)
    monkeypatch.setattr(loop, "load_rules", lambda: load_rules(text))
    rig.restart()


def replays(count: int) -> str:
    labels = 'gpu="0",UUID="GPU-aaaa",nvlink="7"'
    return f"DCGM_NVLINK_REPLAYS{{{labels}}} {count}\n"


async def one_round(rig: Rig, more: str) -> None:
    rig.now += 1
    rig.exporter.page = a_page(next(rig.energy)) + more
    await rig.loop.scrape_once()
    await rig.passes()


@pytest.mark.usefixtures("added")
async def test_a_new_rule_quarantines_a_node_with_evidence_of_its_own_kind(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_rule(rig, monkeypatch, "leaving")
    await one_round(rig, replays(2))
    assert rig.receiver.states() == {}
    await one_round(rig, replays(3))
    verdict = rig.receiver.verdicts["node-0"]
    assert (verdict.state, verdict.reason) == (NodeState.LEAVING, "GpuLinkReplays")
    assert "replays on NVLink 7" in verdict.message
    (quarantine,) = rig.cluster.quarantines()
    (evidence,) = quarantine.evidence
    assert (evidence.kind, evidence.code, evidence.appeared) == ("nvlink-replays", 7, True)
    mark = rig.cluster.nodes()["node-0"].mark
    assert mark is not None
    assert mark.evidence == quarantine.evidence


@pytest.mark.usefixtures("added")
async def test_an_operator_that_does_not_know_the_kind_any_more_keeps_the_quarantine(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_rule(rig, monkeypatch, "leaving")
    await one_round(rig, replays(3))
    monkeypatch.setattr(loop, "load_rules", load_rules)
    rig.restart()
    await one_round(rig, replays(3))
    assert rig.receiver.states() == {"node-0": "leaving"}
    assert len(rig.cluster.quarantines()) == 1


@pytest.mark.usefixtures("added")
async def test_a_rule_may_do_no_more_than_raise_a_suspicion(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_rule(rig, monkeypatch, "suspect")
    await one_round(rig, replays(5))
    assert rig.receiver.states() == {"node-0": "suspect"}
    assert rig.cluster.quarantines() == ()
    await one_round(rig, replays(0))
    assert rig.receiver.states() == {}


def test_what_is_shipped_reads_these_metrics() -> None:
    shipped = load_rules()
    assert list(shipped.by_kind) == ["xid", "double-bit-ecc", "row-remap-failure"]
    assert [rule.outlives_boot for rule in shipped] == [False, False, True]
    assert shipped.metrics["DCGM_EXP_XID_ERRORS_COUNT"] == "xid"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Link,flag,M,R,leaving,no,x", "kind is 'Link': write lower case words with dashes"),
        ("link,no_such,M,R,leaving,no,x", "there is no health/rules/no_such.py"),
        ("link,registry,M,R,leaving,no,x", "health/rules/registry.py has no function read"),
        ("link,flag,,R,leaving,no,x", "metrics is '': write METRIC or METRIC/label"),
        ("link,flag,M,too bad,leaving,no,x", "reason is 'too bad': write one CamelCase word"),
        ("link,flag,M,R,gone,no,x", "verdict is 'gone': write leaving or suspect"),
        ("link,flag,M,R,leaving,maybe,x", "outlives_boot is 'maybe': write yes or no"),
        ("link,flag,M,R,leaving,no", "says is None: write the rest of a sentence"),
        ("xid,flag,M,R,leaving,no,x", "there is a rule of kind xid already"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_the_fix(line: str, said: str) -> None:
    with pytest.raises(RuleError) as raised:
        load_rules(SHIPPED + line + "\n")
    assert str(raised.value).startswith("rules.csv line 5: ")
    assert said in str(raised.value)


def test_a_table_without_its_heading_says_what_it_must_be() -> None:
    with pytest.raises(RuleError, match=",".join(COLUMNS)):
        load_rules("kind,logic\n")

"""Which agents the launcher asks in a period."""

from dataclasses import dataclass, replace

from everstep_agent.local.whom_to_ask import OLD_MS, REPEAT_SECONDS, choose_agents
from everstep_contract import levels


@dataclass(frozen=True)
class An:
    slot: int
    attempt: int
    address: str


AGENTS = [An(slot, 0, f"127.0.0.1:{slot}") for slot in range(3)]
ALL_TOLD = {agent.address: 7 for agent in AGENTS}
RUNS = levels.Seen(running=True, coordinator=levels.SlotAttempt(slot=1, attempt=0))


def asked(
    told: dict[str, int] = ALL_TOLD, newest: levels.Seen = RUNS, since_round: float = 1.0
) -> list[int]:
    found = choose_agents(AGENTS, told, newest, revision=7, since_round=since_round)
    return [agent.slot for agent in found]


def test_in_a_run_without_news_only_the_coordinators_agent() -> None:
    assert asked() == [1]


def test_also_those_that_lack_the_newest_revision() -> None:
    assert asked({**ALL_TOLD, AGENTS[2].address: 6}) == [1, 2]
    assert asked({AGENTS[1].address: 7}) == [0, 1, 2]


def test_all_now_and_then() -> None:
    assert asked(since_round=REPEAT_SECONDS) == [0, 1, 2]


def test_all_while_the_job_does_not_run_or_nobody_is_known_to_coordinate() -> None:
    assert asked(newest=levels.Seen()) == [0, 1, 2]
    assert asked(newest=replace(RUNS, running=False)) == [0, 1, 2]
    assert asked(newest=replace(RUNS, coordinator=None)) == [0, 1, 2]


def test_all_when_the_coordinators_pod_was_replaced_or_its_answer_is_old() -> None:
    replaced = replace(RUNS, coordinator=levels.SlotAttempt(slot=1, attempt=1))
    assert asked(newest=replaced) == [0, 1, 2]
    assert asked(newest=replace(RUNS, age_ms=OLD_MS)) == [0, 1, 2]

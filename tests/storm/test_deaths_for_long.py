"""A rank is killed every few seconds for `EVERSTEP_STORM_SECONDS` (default 180). Every sample must be used once, and
the state must be that of an undisturbed run.

The storm and its judge are those of `make bench-storm` (`benchmarks/storm`).
"""

import os

import pytest

from everstep_storm.faults import DEATHS, plan_strikes
from everstep_storm.goodput import compare_states
from everstep_storm.playing import Plan, Played, play
from everstep_storm.systems import CONTENDERS

SECONDS = float(os.environ.get("EVERSTEP_STORM_SECONDS", "180"))
EVERY, RANKS = 15.0, 4
(OURS,) = [contender for contender in CONTENDERS if contender.proves]


@pytest.mark.long
@pytest.mark.timeout(int(4 * SECONDS) + 600)
def test_deaths_for_long_lose_no_sample_and_change_no_bit() -> None:
    strikes = plan_strikes(DEATHS, seconds=SECONDS, every=EVERY, seed=1)
    stormy = play(OURS, Plan(ranks=RANKS, seconds=SECONDS, strikes=strikes))
    assert_whole(stormy, deaths=len(strikes))
    last = max(map(int, stormy.states))
    calm = play(OURS, Plan(ranks=RANKS, seconds=2 * SECONDS, until=last))
    both, differ = compare_states(calm.states, stormy.states)
    assert (both, differ) == (len(stormy.states), [])
    print(f"{len(strikes)} deaths, {stormy.last_step} steps, state equal at {both} of them")


def assert_whole(played: Played, *, deaths: int) -> None:
    """That no sample is lost, `everstep verify` and the state show, which is that of an undisturbed run. The ranks' log
    lines cannot: if a rank dies after its gradients are in the sum, and the others apply that sum only after they have
    regrouped, their lines name a group without it.
    """
    outcome = played.outcome
    assert (played.problem, played.verify) == ("", "")
    assert sum(bool(struck.pid) for struck in played.struck) == deaths
    assert None not in outcome.pauses, "no new step followed a death"
    assert (outcome.steps_again, outcome.samples_repeated) == (0, 0)
    assert played.states, "the run was too short for a digest of the state"

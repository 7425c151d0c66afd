"""The coordinator's clock, by value."""

from everstep_agent.coordinator.awake_clock import STOPPED_SECONDS, AwakeClock


def test_a_stop_does_not_count() -> None:
    real = [100.0]
    clock = AwakeClock(lambda: real[0])
    seen = []
    for passed in (0.5, 1.0, 3600.0, 0.5):
        real[0] += passed
        seen.append(clock())
    assert seen == [100.5, 101.5, 101.5 + STOPPED_SECONDS, 102.0 + STOPPED_SECONDS]

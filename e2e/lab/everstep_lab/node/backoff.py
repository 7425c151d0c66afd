"""The kubelet's rule for when a container that has ended is restarted.

The first restart is immediate. Later ones wait 10 s, 20 s, … up to 5 minutes after the container's
end. A run of 10 minutes resets the delay.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffRule:
    base: float = 10.0
    cap: float = 300.0
    forget_after: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """`delay` is the wait before the next restart, in seconds."""

    rule: BackoffRule
    delay: float = 0.0

    def after(self, ran: float) -> "Backoff":
        """The back-off after a run of `ran` seconds has ended."""
        if ran >= self.rule.forget_after:
            return Backoff(rule=self.rule)
        return self

    def next(self) -> "Backoff":
        """The back-off after the wait of `delay` seconds is over."""
        doubled = min(max(self.rule.base, 2 * self.delay), self.rule.cap)
        return Backoff(rule=self.rule, delay=doubled)


def is_restarted(policy: str, exit_code: int) -> bool:
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)

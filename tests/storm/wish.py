"""What the test's operator wants from the job, and how events change it. Pure functions."""

from dataclasses import dataclass, field, replace

from everstep_contract import levels

HANG_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    count: int
    revision: int = 1
    generation: int = 1
    peers: dict[int, levels.Peer] = field(default_factory=dict)
    """The current attempt's pod of each slot."""
    dead: dict[int, levels.DeadAgent] = field(default_factory=dict)
    gone: dict[int, levels.SlotAttempt] = field(default_factory=dict)
    leave: frozenset[int] = frozenset()
    stop: levels.Stop = levels.Stop.NONE
    save_every_steps: int = 50
    settings: levels.JobSettings = field(
        default_factory=lambda: levels.JobSettings(hang_seconds=HANG_SECONDS)
    )

    def document(self) -> levels.Wanted:
        return levels.Wanted(
            generation=self.generation,
            revision=self.revision,
            min_workers=self.count,
            want_workers=self.count,
            max_workers=self.count,
            peers=tuple(self.peers[s] for s in sorted(self.peers)),
            leave=tuple(sorted(self.leave)),
            dead=tuple(self.dead[s] for s in sorted(self.dead)),
            gone=tuple(self.gone[s] for s in sorted(self.gone)),
            stop=self.stop,
            save_every_steps=self.save_every_steps,
            settings=self.settings,
        )

    def with_pod(self, slot: int, attempt: int, address: str) -> "Wish":
        peer = levels.Peer(slot=slot, attempt=attempt, address=address)
        return self._next(peers={**self.peers, slot: peer})

    def with_dead(self, slot: int, attempt: int, incarnation: int) -> "Wish":
        """Note that a container has ended, as its kubelet reports it."""
        dead = levels.DeadAgent(slot=slot, attempt=attempt, incarnation=incarnation)
        return self._next(dead={**self.dead, slot: dead})

    def with_gone(self, slot: int, attempt: int) -> "Wish":
        """Declare this attempt gone, whether it still runs or not."""
        gone = levels.SlotAttempt(slot=slot, attempt=attempt)
        return self._next(gone={**self.gone, slot: gone})

    def with_leave(self, slot: int, leaves: bool) -> "Wish":
        return self._next(leave=self.leave | {slot} if leaves else self.leave - {slot})

    def with_stop(self, stop: levels.Stop) -> "Wish":
        return self._next(stop=stop)

    def with_edit(self, keep: int, save_every_steps: int) -> "Wish":
        return self._next(
            generation=self.generation + 1,
            save_every_steps=save_every_steps,
            settings=replace(self.settings, keep=keep),
        )

    def _next(self, **changes: object) -> "Wish":
        return replace(self, revision=self.revision + 1, **changes)  # type: ignore[arg-type]

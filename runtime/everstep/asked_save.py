"""The save that a script asks for in a step. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class AskedSave:
    step: int = 0
    """The newest step that the script wants to save; 0: none."""
    _pins: dict[str, None] = field(default_factory=dict)

    def ask(self, step: int, pin: str | None) -> None:
        """Ask for a save of `step`. The body of a step may run again, so a name counts only
        once.
        """
        if step != self.step:
            self.step, self._pins = step, {}
        if pin is not None:
            self._pins[pin] = None

    def list_pins(self, step: int) -> tuple[str, ...]:
        """Return the names under which the checkpoint of this step is pinned."""
        return tuple(self._pins) if step == self.step else ()

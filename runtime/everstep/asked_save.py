"""The save that a script asks for in a step. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class AskedSave:
    step: int = 0
    """The last step of which it wants one; 0: none."""
    _pins: dict[str, None] = field(default_factory=dict)

    def ask(self, step: int, pin: str | None) -> None:
        """The body of a step may run again: the same names count once."""
        if step != self.step:
            self.step, self._pins = step, {}
        if pin is not None:
            self._pins[pin] = None

    def list_pins(self, step: int) -> tuple[str, ...]:
        """The names for the checkpoint of this step."""
        return tuple(self._pins) if step == self.step else ()

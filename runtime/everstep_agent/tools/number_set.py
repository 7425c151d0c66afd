"""A set of whole numbers for the millions of samples and steps of a long run. Pure."""

_SHIFT = 9
_MASK = (1 << _SHIFT) - 1


class NumberSet:
    """Needs about half a byte for a number if most numbers of its range are in the set."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        """Number of a block of 512 numbers → one bit for each."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        return bool(self._blocks.get(number >> _SHIFT, 0) >> (number & _MASK) & 1)

    def add(self, number: int) -> bool:
        """Whether the number is new."""
        block, bit = number >> _SHIFT, 1 << (number & _MASK)
        held = self._blocks.get(block, 0)
        if held & bit:
            return False
        self._blocks[block] = held | bit
        self._count += 1
        return True

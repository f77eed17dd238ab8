"""Which content was evicted lately, by name: what is computed again soon after is worth more than what comes once."""

from __future__ import annotations

from typing import Final


class EvictedNames:
    """The names that were added last: `most` of them at most, half as many at least.

    Two generations: where the younger one has half of `most`, it becomes the older one, and what that was is forgotten. So
    nothing has an order to be kept, and these are plain dictionaries of bytes, which Python's collector of cycles does not look
    through.
    """

    __slots__ = ("_half", "_older", "_younger")

    def __init__(self, most: int) -> None:
        self._half: Final = most // 2
        self._younger: dict[bytes, None] = {}
        self._older: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._younger) + len(self._older)

    @property
    def names(self) -> tuple[bytes, ...]:
        """All of them, the older generation first."""
        return (*self._older, *self._younger)

    def add(self, names: list[bytes]) -> None:
        """Remember names of what is evicted now, in their order."""
        if len(self._younger) + len(names) < self._half:
            self._younger.update(dict.fromkeys(names))
            return
        for name in names if self._half else ():
            self._younger[name] = None
            if len(self._younger) >= self._half:
                self._older, self._younger = self._younger, {}

    def take(self, name: bytes) -> bool:
        """Whether a name is remembered; it is forgotten with that."""
        for generation in self._younger, self._older:
            if name in generation:
                del generation[name]
                return True
        return False

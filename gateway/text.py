"""From token ids to text, one id at a time: whole characters, and nothing of a stop string. Pure, given a tokenizer's decoding.

The texts that an OutputText gives, joined, are the decoding of all its ids at once, cut at the first stop string. What was given
up to a token depends only on the ids up to it. The cost of a token does not grow with the number before it.

Decoding is not made of parts: a character's bytes may come in several tokens, and a tokenizer may strip or add a space at the
start. So a Detokenizer decodes a short window again with each token, the new token behind a few whose text was given before, and
gives what the window's text grew by. Three things are held back:

- U+FFFD at the window's end, at most three of them: the bytes of a character that may be finished by the next token.
- A run of byte tokens (the `<0x0A>` of byte fallback): the decoder takes a whole run as text or, if any of it is wrong, none of
  it, so none of it is known before the run ends.
- The longest end of the text that a stop string could begin with.

Where there is a least number of tokens, only a stop string that ends in the text of a later one counts, wherever it began.

The stop string whose end comes first wins; of two that end together, the longer. Then it does not matter how the text was cut
into tokens, and no part of any of them is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

#: A UTF-8 character has at most 4 bytes, so an unfinished one shows as at most 3 replacement characters.
_MAX_UNFINISHED: Final = 3

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

#: Tokens that stay as context when a window is cut: more than the bytes of a character (so that what is unfinished lies within,
#: and a character that is cut in two disturbs only the context's own start), and more than a decoder's special first token.
_CONTEXT_TOKENS: Final = 8

#: A window is cut when it has so many tokens. Cutting decodes twice, so not with each one.
_WINDOW_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a tokenizer turns ids into text."""

    #: All ids at once, special tokens kept.
    decode: Callable[[Sequence[int]], str]
    #: Whether an id gives no text and does not part its neighbours: a special token that is skipped, an id without a token.
    is_silent: Callable[[int], bool]
    #: The tokens of byte fallback.
    byte_ids: frozenset[int]


class Detokenizer:
    """See the module. Knows nothing of stop strings."""

    __slots__ = ("_decoding", "_in_run", "_sent", "_window")

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were given
        self._in_run = False  # the last token is a byte token

    def push(self, token: int) -> str:
        """Take the next id; return the text that is certain now and was not given before."""
        if self._decoding.is_silent(token):
            return ""
        self._window.append(token)
        self._in_run = token in self._decoding.byte_ids
        if self._in_run:
            return ""
        text = self._decoding.decode(self._window)
        certain = _certain_length(text)
        grown = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if len(self._window) > _WINDOW_TOKENS:
            self._cut(text)
        return grown

    def flush(self) -> str:
        """Return what was held back, with a replacement character for a character that was never finished. No id comes after."""
        text = self._decoding.decode(self._window)[self._sent :]
        self._window.clear()
        self._sent = 0
        return text

    def _cut(self, text: str) -> None:
        """Shorten the window to its last tokens, if their text alone is seen to end as the whole window's does."""
        kept = self._window[-_CONTEXT_TOKENS:]
        kept_text = self._decoding.decode(kept)
        held = len(text) - self._sent
        # The context may begin in the middle of a character: that shows at its very start, and stays as it is.
        for skipped in range(_MAX_UNFINISHED + 1):
            if len(kept_text) - skipped > held and text.endswith(kept_text[skipped:]):
                self._window = kept
                self._sent = len(kept_text) - held
                return


def _certain_length(text: str) -> int:
    """Return how much of a text no further token can change."""
    end = len(text)
    while end > 0 and len(text) - end < _MAX_UNFINISHED and text[end - 1] == _REPLACEMENT:
        end -= 1
    return end


class StopMatcher:
    """Finds the first end of any of some strings in a text that comes in pieces, and holds back what may become one.

    One Knuth–Morris–Pratt automaton for each string: the number of its characters that the text now ends with.
    """

    __slots__ = ("_failures", "_held", "_include", "_states", "_stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include  # a match is given with the text, so nothing has to be held back
        self._held = ""

    def push(self, piece: str, *, counts: bool = True) -> tuple[str, str]:
        """Take the next piece; return what can be given, and the stop string that ended the text, or an empty one.

        Where it does not count, no string ends the text in this piece.
        """
        if not self._stops:
            return piece, ""
        text = self._held + piece
        for position, character in enumerate(piece, start=len(self._held)):
            match = self._advance(character)
            if match and counts:
                self._held = ""
                end = position + 1
                return text[: end if self._include else end - len(match)], match
        hold = 0 if self._include else max(self._states)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], ""

    def flush(self) -> str:
        """Return what was held back and did not become a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str:
        """Move all automata by one character; return the longest string that is complete, or an empty one."""
        match = ""
        for number, stop in enumerate(self._stops):
            state = self._states[number]
            while state and stop[state] != character:
                state = self._failures[number][state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                match = max(match, stop, key=len)
                state = self._failures[number][state - 1]  # where it does not count, the next one may begin in it
            self._states[number] = state
        return match


def _failure_table(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its end."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = table[length - 1]
        if stop[length] == stop[position]:
            length += 1
        table[position] = length
    return table


class OutputText:
    """The text of one index of one request."""

    __slots__ = ("_detokenizer", "_matcher", "_unchecked")

    def __init__(self, decoding: Decoding, stops: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(decoding)
        self._unchecked = min_tokens  # ids to come in whose text no stop string ends
        self._matcher = StopMatcher(stops, include_stop)

    def push(self, token: int) -> tuple[str, str]:
        """Take the next id; return the new text, and the stop string that ended it or an empty one. A match is the end."""
        counts = self._unchecked == 0
        self._unchecked -= not counts
        return self._matcher.push(self._detokenizer.push(token), counts=counts)

    def finish(self) -> tuple[str, str]:
        """End without a further id; return as `push` does: what was held back may have a stop string in it."""
        text, match = self._matcher.push(self._detokenizer.flush(), counts=self._unchecked == 0)
        return (text, match) if match else (text + self._matcher.flush(), "")

    def finish_with(self, token: int) -> str:
        """End with a stop token whose text is wanted: it is text like any other, but completes no stop string."""
        return self._matcher.flush() + self._detokenizer.push(token) + self._detokenizer.flush()

"""Questions from other threads, answered by the thread that owns the state, between two steps: each answer is one instant.

Knows threads, and how to wake the loop that waits; not what is asked.
"""

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

AnswerT = TypeVar("AnswerT")

#: Questions waiting for the loop. A step takes milliseconds; whoever finds the queue full asks again.
MAX_QUESTIONS: Final = 256

#: Questions answered between two steps, so that a flood of them can't hold the steps up.
_QUESTIONS_AT_ONCE: Final = 16


class EngineBusyError(Exception):
    """Too many questions wait already."""


class Questions:
    """See the module. `ask` and `wake` may be called from any thread, all else belongs to the one that answers."""

    def __init__(self) -> None:
        self.waker: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable while there is something to do
        self._questions: Final[queue.Queue[Callable[[], None]]] = queue.Queue(MAX_QUESTIONS)

    def ask(self, question: Callable[[], AnswerT]) -> "Future[AnswerT]":
        """Have `question` answered between two steps.

        Raises:
            EngineBusyError: too many wait already.
        """
        answer: Future[AnswerT] = Future()

        def reply() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # who asked has stopped waiting; from here on that can't happen
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        try:
            self._questions.put_nowait(reply)
        except queue.Full as error:
            raise EngineBusyError from error
        self.wake()
        return answer

    def wake(self) -> None:
        """Let the loop go on where it waits. Safe in a signal handler."""
        os.eventfd_write(self.waker, 1)

    def answer_some(self) -> None:
        """Answer the questions that wait, up to a bounded number; the rest after the next step."""
        try:
            os.eventfd_read(self.waker)
        except BlockingIOError:
            return
        for _ in range(_QUESTIONS_AT_ONCE):
            try:
                reply = self._questions.get_nowait()
            except queue.Empty:
                return
            reply()
        self.wake()

    def close(self) -> None:
        """Close what wakes the loop."""
        os.close(self.waker)

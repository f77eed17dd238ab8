"""The errors that end a running executor. Those that end a start are kilburn.errors.StartError.

KilburnError
├── PlanError       memmgr sent a plan that can't be run: a bug there, told back in StepResult.error
└── ExecutorError   something here broke while running
"""

from kilburn.errors import KilburnError


class PlanError(KilburnError):
    """A step plan names what does not exist, or does not follow from the plans before it."""


class ExecutorError(KilburnError):
    """A part of this process failed, so that it can't go on."""

"""Messages of engine.proto as a well-behaved gateway and executor would send them, each field to be changed by a test."""

from typing import Any

from kilburn.limits import PROTOCOL
from kilburn.v1 import engine_pb2 as engine
from memmgr.core.table import MemoryCounters
from memmgr.schedule.counters import ScheduleCounters
from memmgr.schedule.plans import Limits
from memmgr.session import Session, StepTotals, Totals

VOCABULARY = 100


def sampling(**changes: Any) -> engine.SamplingParams:
    return engine.SamplingParams(**{"temperature": 0.0, "top_p": 1.0, "seed": 1, **changes})


def submit(handle: int = 1, **changes: Any) -> engine.Submit:
    fields = {
        "handle": handle,
        "tenant": "default",
        "request_id": f"request-{handle}",
        "prompt_ids": [1, 2, 3],
        "sampling": sampling(),
        "max_tokens": 5,
        "samples": 1,
    }
    return engine.Submit(**{**fields, **changes})


def model(**changes: Any) -> engine.ModelInfo:
    fields = {
        "name": "tiny",
        "fingerprint": "f" * 64,
        "context_length": 64,
        "vocab_size": VOCABULARY,
        "block_size": 4,
        "total_blocks": 16,
        "bytes_per_block": 1024,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "reference",
    }
    return engine.ModelInfo(**{**fields, **changes})


def hello(
    attempt: int = 0,
    *,
    max_slots: int = 8,
    max_step_tokens: int = 32,
    protocol: int = PROTOCOL,
    **changes: Any,
) -> engine.ExecutorHello:
    return engine.ExecutorHello(
        protocol=protocol, model=model(**changes), max_slots=max_slots, max_step_tokens=max_step_tokens, attempt=attempt
    )


def totals() -> Totals:
    return Totals(MemoryCounters(), ScheduleCounters(), StepTotals())


def session(now: float = 0.0, **changes: Any) -> Session:
    limits = Limits(max_running=8, max_waiting=16, max_step_tokens=32, context_length=64)
    return Session(7, hello(**changes), limits, totals(), now, prefix_cache=True)

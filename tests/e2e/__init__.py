"""Tests of the whole system: real processes, the real model, answers compared with those of `transformers`."""

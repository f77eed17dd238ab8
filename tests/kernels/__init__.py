"""Tests of the attention kernels against a float64 oracle."""

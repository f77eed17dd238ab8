"""Tests of the executor; tiny models with random weights, plans made by hand."""

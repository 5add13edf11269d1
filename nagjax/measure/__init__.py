"""Measures of how a model uses its depth, as plain functions on arrays; one file per family."""

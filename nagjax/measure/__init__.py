"""Measures of what depth does, as plain functions on arrays; one file per family."""

"""Measurements of prefixd: each figure as a ratio to a baseline taken in the same run."""

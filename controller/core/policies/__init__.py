"""Eviction policies (rule S20): one file each, and one line in `registry`."""

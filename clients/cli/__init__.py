"""The `prefixd` command line."""

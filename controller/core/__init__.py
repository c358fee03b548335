"""The pure core: block index, allocation, eviction, steps; it knows no transport and no clock."""

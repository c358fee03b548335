"""A naive model of a pool, to be compared with the controller's core."""

"""The gRPC skin of the controller: check, call the core, convert the reply."""

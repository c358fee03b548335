"""The worker's gRPC side: its session with the controller and the service it offers."""

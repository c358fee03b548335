"""Whether the process takes new work."""

from prefixd.controller.core.errors import Draining


class Serving:
    """Turns from serving to draining, once."""

    def __init__(self) -> None:
        self._is_draining = False

    def start_draining(self) -> None:
        """Refuses new pools and sessions from now on."""
        self._is_draining = True

    def check_not_draining(self) -> None:
        """Raises Draining once the process is about to end."""
        if self._is_draining:
            raise Draining("the controller is shutting down")

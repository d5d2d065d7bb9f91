"""How a connection to a portal becomes iSER: ``cm`` or ``stream`` (docs/rdma-internals.md).

With ``style=auto`` the style is found by trying. What has worked is remembered, so that a
reconnection does not wait for an answer that never comes.
"""

from __future__ import annotations

MAXIMUM = 256  # portals that are remembered

AUTO = "auto"
CM = "cm"
STREAM = "stream"


class Styles:
    """The styles that have worked, by portal; and the portals where a login has succeeded in any
    way, which need no doubt any more."""

    def __init__(self) -> None:
        self._worked: dict[tuple[str, int], str] = {}
        self._right: dict[tuple[str, str, int], None] = {}

    def order(self, host: str, port: int) -> tuple[str, ...]:
        """Both styles, in the order in which to try them."""
        return (STREAM, CM) if self._worked.get((host, port)) == STREAM else (CM, STREAM)

    def knows(self, host: str, port: int) -> bool:
        """Whether a style has worked there."""
        return (host, port) in self._worked

    def learn(self, host: str, port: int, style: str) -> None:
        """Note that ``style`` has worked. At the limit the oldest entry is forgotten."""
        self._worked.pop((host, port), None)
        if len(self._worked) >= MAXIMUM:
            del self._worked[next(iter(self._worked))]
        self._worked[host, port] = style

    def right(self, scheme: str, host: str, port: int) -> bool:
        """Whether a login with this scheme has succeeded there."""
        return (scheme, host, port) in self._right

    def note_right(self, scheme: str, host: str, port: int) -> None:
        """Note that a login with this scheme has succeeded. At the limit as ``learn``."""
        self._right.pop((scheme, host, port), None)
        if len(self._right) >= MAXIMUM:
            del self._right[next(iter(self._right))]
        self._right[scheme, host, port] = None


STYLES = Styles()  # of this process

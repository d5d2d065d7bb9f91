"""Text that must not be seen."""

from __future__ import annotations

import hmac


class Secret:
    """Text that must not be seen: ``str()``, ``repr()`` and formats of it say ``***``.

    ``reveal`` gives the plain text, for the one place that needs it. False when empty.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def __repr__(self) -> str:
        return "***"

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        """In constant time."""
        return isinstance(other, Secret) and hmac.compare_digest(
            self._text.encode(errors="surrogateescape"),
            other._text.encode(errors="surrogateescape"),
        )

    def __hash__(self) -> int:
        return hash(Secret)  # tells nothing

    def reveal(self) -> str:
        return self._text

"""A type for text that must not appear in output."""

from __future__ import annotations

import hmac


class Secret:
    """Text that must not appear in output: ``str()``, ``repr()`` and formats of it give ``***``.

    ``reveal`` returns the plain text, for code that needs it. An empty Secret is false.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def __repr__(self) -> str:
        return "***"

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        """Compare in constant time."""
        return isinstance(other, Secret) and hmac.compare_digest(
            self._text.encode(errors="surrogateescape"),
            other._text.encode(errors="surrogateescape"),
        )

    def __hash__(self) -> int:
        return hash(Secret)  # the same for all secrets: reveals nothing

    def reveal(self) -> str:
        return self._text

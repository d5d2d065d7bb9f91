"""The ways to one target: iSER in both styles, and Traditional iSCSI."""

from __future__ import annotations

from typing import Final

TRANSPORTS: Final = ("iser", "iscsi", "stream")


def by(transport: str, url: str, options: str = "") -> str:
    """``url``, which begins with iser://, by a transport of TRANSPORTS. ``options``: key=value, &
    between them."""
    if transport == "iscsi":
        url = url.replace("iser:", "iscsi:")
    if transport == "stream":
        options = f"{options}&style=stream" if options else "style=stream"
    return f"{url}?{options}" if options else url

"""Named LUNs as commands show them: without secrets."""

from __future__ import annotations

from iserblk.errors import BadArgument
from iserblk.named.files import Named
from iserblk.url import parse_url

_HIDDEN = "target-password"


def shown_url(text: str) -> str:
    """A URL without user info, and without a secret among its options."""
    try:
        url = parse_url(text)
    except BadArgument:
        return "a URL with an error"
    words = "&".join(_shown(name, value) for name, value in url.options.items())
    return f"{url.redacted()}{words and '?' + words}"


def shown_word(word: str) -> str:
    """A word of -o without a secret."""
    name, equals, value = word.partition("=")
    return _shown(name, value) if equals else word


def _shown(name: str, value: str) -> str:
    hidden = name.replace("_", "-") == _HIDDEN
    return f"{name}={'***' if hidden else value}" if value else name


def users(named: Named) -> list[str]:
    """The CHAP users of its URLs. Raises BadArgument, which names the file, for one that is
    wrong."""
    found = []
    for text in named.urls:
        try:
            url = parse_url(text)
        except BadArgument as error:
            raise BadArgument(f"{named.path}: {error}") from None
        if url.user and url.user not in found:
            found.append(url.user)
    return found


def fields(named: Named) -> dict[str, object]:
    """For JSON. Raises BadArgument when a URL is wrong."""
    return {
        "name": named.name,
        "file": str(named.path),
        "urls": [shown_url(text) for text in named.urls],
        "devices": list(named.devices),
        "mountpoint": named.mountpoint or None,
        "options": [shown_word(word) for word in named.words],
        "users": users(named),
        "error": "",
    }

"""Hides secrets in what the doctor tells: those that are known, and what looks like one.

No text of a report should have a secret to begin with: reports are made of what is known to be
harmless, and logs have none. This is the last place, for what users have typed on command lines,
and for what other programs have logged. In doubt it hides too much.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from html import escape
from urllib.parse import quote, quote_plus

from iserblk.printable import printable
from iserblk.secret import Secret
from iserblk.url import OF_ALL, OF_LUNS

HIDDEN = "***"
_SHORT = 6  # characters: a shorter secret is hidden as a whole word alone; others would lose parts
_LONGEST = 8192  # characters of a word or line

# User info ends at the last @ of a URL, and a secret may have blanks and, wrongly, slashes in it:
# all up to the last @ before the next URL. The host behind it stays.
_USER_INFO = re.compile(
    rf"\b({OF_ALL}|nbds?|nbds?\+unix|https?):/{{0,2}}(?:(?!\b(?:{OF_LUNS})://).)*@",
    re.IGNORECASE | re.DOTALL,
)
_LAST_URL = re.compile(rf"\b(?:{OF_LUNS}|https?):(?!.*\b(?:{OF_LUNS}|https?):).*\Z", re.DOTALL)
# A URL without its scheme. Its user info begins somewhere in front of the @.
_NO_SCHEME = re.compile(r"[^\s/]+@(?=[^\s/@]+/(?:iqn|eui|naa)\.)", re.IGNORECASE)
# A value may have anything but & in a URL; where a line goes on behind it, that is hidden as well.
_KEY = re.compile(r"(target[-_]password\s*[=:]\s*)[^&\n]+", re.IGNORECASE)
# Keys of other programs' files and logs: node.session.auth.password, "chap_password": "…", token=….
# Not chap-secret-file=PATH: behind a key stands = or :.
# A value may have , and ; in it: all up to the next blank is hidden.
_NAMES = r"(?:passw(?:or)?d(?:_in)?|passphrase|secret|token|api[-_]?key)"
_OTHERS = re.compile(
    rf"(?<!target.)({_NAMES}[\"']?\s*[=:]\s*)"
    r"(?:(?:\"(?:[^\"\\]|\\.)*\"|'[^']*')[^\s,;&}\])]*|\S+)",
    re.IGNORECASE,
)
# A whole word of a command line: LIBISCSI_CHAP_PASSWORD=… in front of a command.
_ASSIGNMENT = re.compile(rf"(-{{0,2}}[\w.-]*{_NAMES}[=:]).+", re.IGNORECASE | re.DOTALL)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_JWT = re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*")
# What a listener needs to try secrets out.
_CHAP = re.compile(r"\b(CHAP_[RC]\s*=\s*)[^\s,;]+")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL)

_ESCAPE = re.compile("%[0-9A-F]{2}")
_IN_GO = {ord(each): f"\\u{ord(each):04x}" for each in "<>&"}
_OURS = ("status", "state", "provider")  # keys in JSON


class Hider:
    """Hides ``secrets``, in all forms in which programs write them, and what looks like a secret.
    An empty secret is ignored."""

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        long: set[str] = set()
        short: set[str] = set()
        for secret in secrets:
            for form in _forms(secret.reveal()):
                (long if len(form) >= _SHORT else short).add(form)
        found = [re.escape(each) for each in sorted(long, key=len, reverse=True)]
        found += [rf"(?<!\w){re.escape(each)}(?!\w)" for each in sorted(short, reverse=True)]
        self._known = re.compile("|".join(found)) if found else None

    def text(self, text: str) -> str:
        """``text``, such as a line of a log, without secrets."""
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        if len(text) > _LONGEST:  # the @ of a URL may be behind the cut
            text = f"{_LAST_URL.sub('', text[:_LONGEST])}…"
        text = _PEM.sub(HIDDEN, text)
        text = _USER_INFO.sub(r"\1://…@", text)
        text = _NO_SCHEME.sub("…@", text)
        text = _KEY.sub(rf"\1{HIDDEN}", text)
        text = _OTHERS.sub(rf"\1{HIDDEN}", text)
        text = _CHAP.sub(rf"\1{HIDDEN}", text)
        return _JWT.sub(HIDDEN, _BEARER.sub(rf"\1 {HIDDEN}", text))

    def word(self, word: str) -> str:
        """One word of a command line without secrets: an @ out of place may be the end of user
        info with a secret, so only what is behind it is shown."""
        if (found := _ASSIGNMENT.fullmatch(word)) is not None:
            return f"{self.text(found[1])}{HIDDEN}"
        word = self.text(word)
        if "@" in word and "…@" not in word and not word.startswith("/"):
            return f"…@{word.rpartition('@')[2]}"
        return word

    def tree(self, value: object) -> object:
        """What JSON can have, with no secret in any text. Keys, which are ours, stay, and so do
        values that can be a few words of ours only."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: each if key in _OURS else self.tree(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(each) for each in value]
        return value


def _forms(secret: str) -> set[str]:
    """A secret as it is, and as programs write it: in URLs, JSON, HTML, logs, manifests, and in
    hexadecimal digits."""
    if not secret.strip():
        return set()
    octets = secret.encode(errors="surrogateescape")
    lossy = octets.decode(errors="replace")
    encodings = [base64.b64encode(octets + end).decode() for end in (b"", b"\n")]
    found = {
        *(secret, lossy, printable(secret), printable(lossy), repr(secret)[1:-1]),
        *(json.dumps(lossy)[1:-1], json.dumps(lossy, ensure_ascii=False)[1:-1]),
        *(octets.decode(errors="backslashreplace"), secret.replace("'", "'\"'\"'")),
        *(repr(octets)[2:-1], ascii(secret)[1:-1], escape(lossy), escape(lossy, quote=False)),
        *(quote(octets, safe=""), quote(octets), quote_plus(octets)),
        *(each.rstrip("=") for each in encodings),
    }
    # Other programs write %2f, and programs in Go \u0026.
    found |= {_ESCAPE.sub(lambda each: each[0].lower(), form) for form in found}
    found |= {form.translate(_IN_GO) for form in found}
    # A short one would be found in any number.
    if len(octets) >= _SHORT:
        found |= {octets.hex(), octets.hex().upper()}
    return {each for each in found if each.strip()}

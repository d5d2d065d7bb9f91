"""Names on a command line become URLs: the only place that does it, for every command.

The options of a name's file become keys of its URLs, except those that the command was given: so a
command's options override those of the file, and a URL's own keys override both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from iserblk.errors import BadArgument, WriteProtected
from iserblk.files import is_there
from iserblk.named.files import Named, find, load, may_be_name
from iserblk.options import OPTION_NAMES
from iserblk.url import OF_ONE_SCHEME, Url, is_url, parse_url

# One of these excludes the others.
_SOURCES = ("chap-secret-file", "chap-secret-fd", "chap-secret-credential")


@dataclass(slots=True, frozen=True)
class Resolved:
    """``urls``: in place of names those of their files. ``named``: the names' files. ``words``:
    what their OPTIONS have beside options of iserblk: words of -o of mount."""

    urls: list[str] = field(repr=False)
    named: list[Named] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    @property
    def read_only(self) -> bool:
        return [word for word in self.words if word in ("ro", "rw")][-1:] == ["ro"]


def names_lun(word: str) -> bool:
    """Whether there is a LUN of that name."""
    return may_be_name(word) and find(word) is not None


def names_lun_not_file(word: str) -> bool:
    """As ``names_lun``, where a file could be meant as well. Raises BadArgument where one has that
    name, too: the wrong one of them might be overwritten."""
    if is_url(word) or not names_lun(word):
        return False
    if is_there(word):
        raise BadArgument(
            f"{word}: there is a LUN of that name, and a file: write ./{word} for the file;"
            " for the LUN write its URL, or run the command in another directory"
        )
    return True


def resolve(words: Sequence[str], given: Mapping[str, str]) -> Resolved:
    """URLs for URLs and names. ``given``: the command's own options. What has neither form is left
    as it is: the parser of URLs says what is wrong with it. Raises BadArgument."""
    urls: list[str] = []
    files: list[Named] = []
    others: list[str] = []
    for word in words:
        if is_url(word) or not may_be_name(word):
            urls.append(word)
            continue
        if not names_lun(word):
            raise BadArgument(
                f"{word}: not a URL: it has no scheme; write iser://HOST/iqn.2026-11.example:disk/0"
                f" (and there is no LUN of that name: `iserblk list` shows the names)"
            )
        named = load(word)
        options, more = split_words(named)
        try:
            urls += _with_options(named, options, given)
        except BadArgument as error:
            raise BadArgument(f"{named.path}: {error}") from None
        files.append(named)
        others += more
    return Resolved(urls, files, others)


def urls_of(words: Sequence[str], given: Mapping[str, str], *, to_write: bool = False) -> list[str]:
    """As ``resolve``, for commands that of mount's own options only ``ro`` concerns: raises
    WriteProtected for it if the command is ``to_write``."""
    resolved = resolve(words, given)
    if to_write and resolved.read_only:
        raise WriteProtected("a named LUN here has the option ro: it is not written to")
    return resolved.urls


def split_words(named: Named) -> tuple[dict[str, str], list[str]]:
    """The options of iserblk in OPTIONS, and the other words, as they stand there."""
    options: dict[str, str] = {}
    others = []
    for word in named.words:
        name, _, value = word.partition("=")
        key = name.replace("_", "-")
        if key in OPTION_NAMES:
            options[key] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
        else:
            others.append(word)
    return options, others


def _with_options(named: Named, options: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    parsed = [parse_url(text) for text in named.urls]
    schemes = {url.scheme for url in parsed}
    return [
        _with_keys(text, _missing(url, options, given, schemes))
        for text, url in zip(named.urls, parsed, strict=True)
    ]


def _missing(
    url: Url, options: Mapping[str, str], given: Mapping[str, str], schemes: set[str]
) -> dict[str, str]:
    """The options that ``url`` gets from the file."""
    taken = {name.replace("_", "-") for name in (*given, *url.options)}
    if url.password or taken.intersection(_SOURCES):
        taken.update(_SOURCES)
    for scheme in schemes - {url.scheme}:
        taken.update(OF_ONE_SCHEME[scheme])  # meant for the URLs of that scheme
    return {name: value for name, value in options.items() if name not in taken}


def _with_keys(text: str, keys: Mapping[str, str]) -> str:
    if not keys:
        return text
    for name, value in keys.items():
        if "&" in value:
            raise BadArgument(f"option {name} has an &, which a URL has no place for")
    path = text.partition("://")[2].partition("/")[2]
    separator = "&" if "?" in path else "?"
    return f"{text}{separator}{'&'.join(f'{name}={value}' for name, value in keys.items())}"

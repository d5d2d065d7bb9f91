"""URLs: addresses of LUNs, targets and portals.

    iser://[user[%password]@]host[:port]/target-iqn[/lun][?key=value&…]
    iscsi://… the same over Traditional iSCSI

The grammar is libiscsi's. User info ends at the last ``@`` before the first ``/``, splits at its
first ``%`` or ``:``, is not percent-decoded, and is never shown: if a URL may have user info in the
wrong place, errors quote nothing of it. The target name is percent-decoded. ``iscsi://…?iser``
means ``iser://…``. Errors name the thing and the remedy.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from iserblk.errors import BadArgument, NotSupported
from iserblk.names import check_name, shown
from iserblk.options import NO_BYTE_STREAM, Options
from iserblk.secret import Secret

DEFAULT_PORT = 3260
ISNS_PORT = 3205
SLP_PORT = 427
SCHEMES = ("iser", "iscsi")
_DIRECTORIES = {"isns": ISNS_PORT, "slp": SLP_PORT}  # schemes of what tells where targets are
# For patterns: of every URL of ours, which may have a secret.
OF_LUNS = "|".join(SCHEMES)
OF_ALL = "|".join((*SCHEMES, *_DIRECTORIES))
MAXIMUM_LUN = 16383
_EXAMPLE = "iser://HOST/iqn.2026-11.example:disk/0"
_MEANT = re.compile(rf"({OF_ALL}):", re.ASCII | re.IGNORECASE)
# A URL without its scheme: its user may have a secret.
_NO_SCHEME = re.compile(r"[^/]*@[^/]+/(?:iqn|eui|naa)\.", re.IGNORECASE)
_HOST = re.compile(r"[^\W_]([\w.-]*[^\W_])?\.?")  # letters of any script, because of IDNA


@dataclass(slots=True, frozen=True)
class Url:
    """The parts of one URL. ``lun`` None: every disk of the target. ``options``: the keys behind
    ``?``, as given. ``user`` and ``password`` are empty if there is no user info."""

    scheme: str
    host: str
    port: int
    iqn: str
    lun: int | None
    user: str = field(default="", repr=False)
    password: Secret = field(default_factory=Secret, repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)  # hyphenated keys

    def redacted(self) -> str:
        """The URL without user info and options, for logs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lun = "" if self.lun is None else f"/{self.lun}"
        return f"{self.scheme}://{host}:{self.port}/{self.iqn}{lun}"


def _hidden(_text: str) -> str:
    return "(not shown)"


_DIGEST = (
    "header-digest, data-digest: there are no iSCSI digests over iSER; the MPA CRC (mpa-crc=yes) "
    "protects the data; leave them out, or use an iscsi:// URL"
)


def is_url(text: str) -> bool:
    """Whether ``text`` is meant as a URL, and not as a path. It may be wrong, and have a secret."""
    return "://" in text or _MEANT.match(text) is not None


def may_be_url(text: str) -> bool:
    """Whether ``text`` is meant as a URL, perhaps without its scheme, and not as a path."""
    return is_url(text) or _NO_SCHEME.match(text) is not None


def parse_url(text: str) -> Url:
    """Take a URL apart. Raises BadArgument, whose text never shows user info."""
    return split_url(text)


# Options that ``check_scheme`` refuses for the URLs of another scheme.
OF_ONE_SCHEME = {
    "iser": ("rcap", "style", "hello", "header"),
    "iscsi": ("header-digest", "data-digest"),
}


def fitting(url: Url, options: Options) -> Options:
    """The options without those that the scheme of ``url`` does not know."""
    if url.scheme == "iser":
        return replace(options, header_digest="None", data_digest="None")
    return replace(options, rcap="auto", style="auto", hello=False, header=28)


def check_scheme(url: Url, options: Options) -> None:
    """Check that ``options`` fit the URL's scheme. Raises NotSupported."""
    asked = (options.header_digest, options.data_digest)
    if url.scheme == "iser" and asked != ("None", "None"):
        raise NotSupported(_DIGEST)
    if url.scheme == "iscsi" and options.rcap != "auto":
        raise NotSupported("rcap: an iscsi:// URL means TCP; leave it out, or use an iser:// URL")
    if url.scheme == "iscsi" and (options.hello or options.header != 28):
        name = "hello" if options.hello else "header"
        raise NotSupported(
            f"{name}: an iscsi:// URL means Traditional iSCSI, without iSER's messages; leave it"
            " out, or use an iser:// URL"
        )
    if url.scheme == "iscsi" and options.style != "auto":
        raise NotSupported("style: an iscsi:// URL means TCP; leave it out, or use an iser:// URL")
    if options.style == "stream" and options.rcap in NO_BYTE_STREAM:
        raise NotSupported(
            f"style=stream: {NO_BYTE_STREAM[options.rcap]} has no byte stream; leave it out, or "
            "say rcap=iwarp"
        )


def parse_place(text: str) -> Url:
    """Take a URL apart that needs no target: ``iqn`` is "" without one. Accepts
    ``isns://HOST[:PORT]`` and ``slp://[HOST[:PORT]]``, too. Raises BadArgument."""
    return split_url(text, needs_target=False)


def split_url(text: str, needs_target: bool = True) -> Url:
    """Take a URL apart. With ``needs_target`` False a URL without a target, isns:// and slp:// are
    accepted. Raises BadArgument."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        what = "the // behind its scheme is missing" if is_url(text) else "it has no scheme"
        raise BadArgument(f"not a URL: {what}; write {_EXAMPLE}")
    scheme = scheme.lower()
    if scheme not in SCHEMES and (needs_target or scheme not in _DIRECTORIES):
        name = shown(scheme) if scheme.isalnum() else "in front of ://"
        raise BadArgument(f"unknown scheme {name}; write {_EXAMPLE}")
    authority, slash, path = rest.partition("/")
    if slash:
        path, question, query = path.partition("?")
    else:
        authority, question, query = authority.partition("?")
    # An @ behind the first slash probably ends user info that has a slash in it: quote nothing.
    quote: Callable[[str], str] = shown if "@" not in path else _hidden
    user, password, portal = _user_info(authority)
    host, port = "", SLP_PORT
    if not portal and scheme == "isns":
        raise BadArgument("the URL has no host; write isns://HOST[:PORT]")
    if portal or scheme != "slp":  # slp:// alone means all agents of the network
        host, port = _host_port(portal, _DIRECTORIES.get(scheme, DEFAULT_PORT))
    if not path and needs_target:
        raise BadArgument(
            f"the URL names no target; `iserblk discover {scheme}://HOST` lists those of a portal"
        )
    iqn, slash, lun = path.partition("/")
    iqn = check_name(unquote(iqn), "target name", quote) if path else ""
    if slash and not lun:
        raise BadArgument("the URL ends with / but has no LUN; add its number, or remove the /")
    options = _query(query) if question else {}
    if options.pop("iser", None) is not None:
        scheme = "iser"  # libiscsi's other spelling of iser://
    return Url(
        scheme=scheme,
        host=host,
        port=port,
        iqn=iqn,
        lun=_lun(lun, quote) if lun else None,
        user=user,
        password=password,
        options=options,
    )


def parse_portal(text: str, default: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of ``HOST[:PORT]``, ``[IPv6 address][:PORT]``. Raises BadArgument."""
    if "/" in text or "@" in text:
        raise BadArgument(f"portal {shown(text)}: write HOST[:PORT], or a URL")
    return _host_port(text, default)


def _user_info(authority: str) -> tuple[str, Secret, str]:
    info, at, portal = authority.rpartition("@")
    if not at:
        return "", Secret(), authority
    match = re.search("[%:]", info)
    user = info[: match.start()] if match else info
    if not user:
        raise BadArgument("the URL has an @ without a user in front of it; write user%password@")
    return user, Secret(info[match.end() :] if match else ""), portal


def _host_port(portal: str, default: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of a portal. Errors quote nothing of it: it may be user info without its @."""
    if portal.startswith("["):
        host, bracket, port = portal[1:].partition("]")
        if not bracket:
            raise BadArgument("the URL has a [ without ]; write [IPv6 address]:port")
        if port and not port.startswith(":"):
            raise BadArgument("the URL has something behind ]; write [IPv6 address]:port")
        colon, port = port[:1], port[1:]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise BadArgument("there is no IPv6 address in the URL's [ ]; write [::1]") from None
    else:
        host, colon, port = portal.partition(":")
        if ":" in port:
            raise BadArgument("an IPv6 address in a URL needs brackets: write [address]:port")
        if not host:
            raise BadArgument(f"the URL has no host; write {_EXAMPLE}")
        if not _HOST.fullmatch(host):
            raise BadArgument(
                "the URL's host has a character that no host name has; "
                "is the @ behind user%password missing?"
            )
    if not colon:
        return host, default
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise BadArgument("the port is not a number from 1 to 65535")
    return host, int(port)


def _lun(text: str, quote: Callable[[str], str]) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= MAXIMUM_LUN):
        raise BadArgument(f"LUN {quote(text)}: give a number from 0 to {MAXIMUM_LUN}")
    return int(text)


def _query(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in query.split("&"):
        key, _, value = item.partition("=")
        key = key.replace("_", "-")
        if not key:
            raise BadArgument("an empty option in the URL; write ?key=value&key=value")
        if key in options:
            raise BadArgument(f"option {shown(key)} is given twice in the URL")
        options[key] = value
    return options


def name_portal(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

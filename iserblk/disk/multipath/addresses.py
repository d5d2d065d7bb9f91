"""Addresses of LUNs: URLs with their options settled; URLs of the same LUN are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from iserblk.credentials import find_credentials
from iserblk.disk.multipath.paths import Paths
from iserblk.errors import BadArgument
from iserblk.loop.clock import monotonic
from iserblk.names import shown
from iserblk.options import PORTAL, Options
from iserblk.url import OF_ONE_SCHEME, Url, check_scheme, parse_place, parse_url


@dataclass(slots=True, frozen=True)
class Address:
    """One URL with its options settled. ``paths``: all portals, where other URLs name the same LUN
    through other portals."""

    url: Url
    options: Options
    paths: Paths | None = None


def settle(urls: Sequence[str], options: Mapping[str, str]) -> list[Address]:
    """Parse all URLs. ``options`` hold for each URL; its own keys override them. An option that
    only one scheme knows holds for the URLs of that scheme, if there are any. URLs that name the
    same LUN through different portals become one address. Raises BadArgument or NotSupported before
    anything is connected."""
    if isinstance(urls, str):  # from Python: each of its characters would be taken for a URL
        raise BadArgument("a list of URLs is needed, and here is a text: write [URL]")
    if not urls:
        raise BadArgument("no URL: give at least one, e.g. iser://HOST/iqn.2026-11.example:disk/0")
    common = dict(options)
    addresses = []
    parsed = [parse_url(text) for text in urls]
    schemes = {url.scheme for url in parsed}
    for url in parsed:
        others = [
            key
            for scheme, keys in OF_ONE_SCHEME.items()
            if scheme in schemes and scheme != url.scheme
            for key in keys
        ]
        fitting = {key: common[key] for key in common if key.replace("_", "-") not in others}
        settled = Options.from_pairs({**fitting, **url.options}.items())
        check_scheme(url, settled)
        if settled.discover not in ("", PORTAL):
            directory(settled)
        find_credentials(url, settled)  # so that errors in them are raised now
        addresses.append(Address(url, settled))
    return _join(addresses)


def _join(addresses: Sequence[Address]) -> list[Address]:
    """One address for each LUN of a target, with all the portals that were given for it."""
    groups: dict[tuple[str, int | None], list[Address]] = {}
    for each in addresses:
        same = groups.setdefault((each.url.iqn.lower(), each.url.lun), [])
        portal = (each.url.scheme, each.url.host, each.url.port)
        if portal in [(known.url.scheme, known.url.host, known.url.port) for known in same]:
            raise BadArgument(
                f"{each.url.redacted()}: given twice; give another portal, or leave it out"
            )
        same.append(each)
    return [same[0] if len(same) == 1 else with_paths(same) for same in groups.values()]


def with_paths(ways: Sequence[Address]) -> Address:
    """One address with all these ways to its LUN, the preferred way first."""
    first = ways[0]
    return replace(first, paths=Paths(in_session_of(first, ways), monotonic))


def in_session_of(first: Address, ways: Sequence[Address]) -> list[tuple[Url, Options]]:
    """Ways for a session that began with ``first``. A session keeps some options for its whole
    life, so those of the first URL hold."""
    return [
        (
            each.url,
            replace(
                each.options,
                queue_depth=first.options.queue_depth,
                io_timeout=first.options.io_timeout,
                command_timeout=first.options.command_timeout,
            ),
        )
        for each in ways
    ]


def directory(options: Options) -> Url:
    """The server or agent that ``portals=`` names. Raises BadArgument."""
    try:
        url = parse_place(options.discover)
    except BadArgument as error:
        raise BadArgument(f"portals={shown(options.discover)}: {error}") from None
    if url.iqn:
        raise BadArgument("portals: the target is that of the URL: leave out its name behind HOST")
    return url

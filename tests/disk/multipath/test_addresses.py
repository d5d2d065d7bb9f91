"""URLs with their options settled, and those of one LUN joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import trio

from iserblk.disk import aio, blocking
from iserblk.disk import asyncio as asyncio_disks
from iserblk.disk.multipath.addresses import settle
from iserblk.errors import BadArgument, IserblkError, NotSupported

IQN = "iqn.2026-11.example:disk"


def url(host: str, lun: int | None = 0, query: str = "", scheme: str = "iser") -> str:
    path = IQN if lun is None else f"{IQN}/{lun}"
    return f"{scheme}://{host}/{path}{'?' + query if query else ''}"


def test_one_url() -> None:
    (found,) = settle([url("192.0.2.1")], {})
    assert (found.url.host, found.url.lun, found.paths) == ("192.0.2.1", 0, None)


def test_a_url_overrides_the_options_for_all() -> None:
    one, other = settle(
        [url("192.0.2.1", 0, "io-timeout=5"), url("192.0.2.1", 1)],
        {"io-timeout": "9", "queue-depth": "16"},
    )
    assert (one.options.io_timeout, one.options.queue_depth) == (5.0, 16)
    assert (other.options.io_timeout, other.options.queue_depth) == (9.0, 16)


def test_several_portals_of_one_lun_become_one_address() -> None:
    (found,) = settle([url("192.0.2.1"), url("192.0.2.2"), url("192.0.2.1", scheme="iscsi")], {})
    assert found.url.host == "192.0.2.1" and found.paths is not None


def test_what_a_session_has_from_its_beginning_is_the_first_ones() -> None:
    (found,) = settle(
        [url("192.0.2.1", 0, "queue-depth=8"), url("192.0.2.2", 0, "queue-depth=64")], {}
    )
    assert found.options.queue_depth == 8


def test_other_luns_and_other_targets_stay_apart() -> None:
    luns = settle([url("192.0.2.1", 0), url("192.0.2.1", 1)], {})
    assert [each.url.lun for each in luns] == [0, 1]
    other = settle([url("192.0.2.1"), "iser://192.0.2.1/iqn.2026-11.example:other/0"], {})
    assert all(each.paths is None for each in other)


def test_options_of_one_scheme_hold_for_its_urls() -> None:
    """rcap=verbs with an iscsi:// URL among several is about the iser:// URLs."""
    given = {"rcap": "verbs", "style": "cm", "hello": "yes", "header_digest": "crc32c"}
    one, other, third = settle(
        [
            url("192.0.2.1", 0),
            url("192.0.2.1", 1, scheme="iscsi"),
            url("192.0.2.1", 2, "rcap=iwarp"),
        ],
        given,
    )
    assert (one.options.rcap, one.options.style, one.options.hello) == ("verbs", "cm", True)
    assert one.options.header_digest == "None"
    assert (other.options.rcap, other.options.style, other.options.hello) == ("auto", "auto", False)
    assert other.options.header_digest == "CRC32C"
    assert third.options.rcap == "iwarp"


@pytest.mark.parametrize(
    ("urls", "options", "words"),
    [
        (
            [url("h", 0, scheme="iscsi"), url("g", 0, scheme="iscsi")],
            "rcap",
            "rcap: an iscsi:// URL",
        ),
        ([url("h", 0, scheme="iscsi")], "style", "style: an iscsi:// URL"),
        ([url("h", 0), url("g", 0)], "data-digest", "digest"),
        ([url("h", 0), url("g", 0, "rcap=verbs", scheme="iscsi")], "", "rcap: an iscsi:// URL"),
    ],
)
def test_options_that_no_url_knows(urls: list[str], options: str, words: str) -> None:
    values = {"rcap": "verbs", "style": "cm", "data-digest": "crc32c"}
    with pytest.raises(NotSupported, match=words):
        settle(urls, {options: values[options]} if options else {})


def test_names_of_targets_are_compared_without_case() -> None:
    (found,) = settle([url("192.0.2.1"), url("192.0.2.2").replace("example", "EXAMPLE")], {})
    assert found.paths is not None


@pytest.mark.parametrize(
    ("urls", "options", "words"),
    [
        ([], {}, "no URL: give at least one"),
        (f"iser://h/{IQN}/0", {}, "a list of URLs is needed"),
        ([url("192.0.2.1"), url("192.0.2.1")], {}, "given twice"),
        ([url("192.0.2.1")], {"queue-depth": "many"}, "queue-depth"),
        ([url("192.0.2.1")], {"no-such-option": "1"}, "no-such-option"),
        (["nonsense"], {}, "not a URL: it has no scheme"),
    ],
)
def test_wrong_input_is_named(urls: list[str], options: dict[str, str], words: str) -> None:
    with pytest.raises(IserblkError, match=words) as caught:
        settle(urls, options)
    assert isinstance(caught.value, BadArgument)


def _by_threads(urls: str) -> None:
    with blocking.open_disks(urls):
        pass


def _by_trio(urls: str) -> None:
    async def body() -> None:
        async with aio.open_disks(urls):
            pass

    trio.run(body)


def _by_asyncio(urls: str) -> None:
    async def body() -> None:
        async with asyncio_disks.open_disks(urls):
            pass

    asyncio.run(body())


@pytest.mark.parametrize("opens", [_by_threads, _by_trio, _by_asyncio])
def test_each_way_to_open_names_a_text_in_place_of_a_list(opens: Callable[[str], None]) -> None:
    with pytest.raises(BadArgument, match="a list of URLs is needed"):
        opens(url("192.0.2.1"))

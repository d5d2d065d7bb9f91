"""``iserblk discover``: what it prints, and its exit status."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.discovery.ranking import is_near, local_networks
from iserblk.iscsi.bhs import LOGIN_REQUEST, LOGIN_RESPONSE
from iserblk.iscsi.text import encode
from tests.cli.commands import bad, good, good_json, iserblk, serving
from tests.support.portal import Portal, portals
from tests.support.profiles import jiva, scst
from tests.support.spy import spying
from tests.support.target import IQN, ROOT, TargetProcess, running_target

JSON_DOCUMENT = (ROOT / "docs/json.md").read_text()
OTHER = "iqn.2026-11.example:other"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("discover")
    with running_target([f"{place}/disk:size=1M"], place / "log") as process:
        yield process


@pytest.fixture
def portal() -> Iterator[Portal]:
    with portals(1) as (one,):
        yield one


def documented(title: str) -> set[str]:
    """The field names in the table below ``title``."""
    section = JSON_DOCUMENT.partition("## iserblk discover\n")[2].partition("\n## ")[0]
    rows = section.partition(f"{title}:\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.parametrize("scheme", ["", "iser://", "iscsi://"])
def test_the_embedded_target(target: TargetProcess, scheme: str) -> None:
    """Over iSER by default, and over TCP. proves: ISER-RC-19"""
    text = good("discover", f"{scheme}{target.listen}")
    name, way = text.splitlines()
    assert name == IQN
    assert way.startswith(f"  {scheme or 'iser://'}{target.listen}/{IQN} ")
    assert "group 1" in way and "own subnet" in way
    assert ("takes iSER" in way) == (scheme != "iscsi://")


def test_the_urls_that_it_shows_work(target: TargetProcess) -> None:
    for scheme in ("iser", "iscsi"):
        report = good_json("discover", f"{scheme}://{target.listen}")
        ((url,),) = [[way["url"] for way in each["portals"]] for each in report["targets"]]
        assert good_json("info", url)["disks"][0]["target"] == IQN


def test_json_is_as_documented(target: TargetProcess) -> None:
    report = good_json("discover", target.listen)
    assert set(report) == documented("One object")
    assert set(report["targets"][0]) == documented("A target")
    assert set(report["targets"][0]["portals"][0]) == documented("A portal")
    assert report["source"] == f"iser://{target.listen}"


def test_probing(target: TargetProcess, portal: Portal) -> None:
    """Portals that are found over TCP are asked for iSER, by a trial: their addresses say nothing
    of a type. A portal that accepts it comes first.

    proves: ISER-GEN-3.4-3, ISER-GEN-4-2
    """
    portal.answer = [
        encode(
            [
                ("TargetName", IQN),
                ("TargetAddress", f"{portal.name},1"),
                ("TargetAddress", f"{target.listen},2"),
            ]
        )
    ]
    where = f"iscsi://{portal.name}"
    plain = good("discover", where).splitlines()[1:]
    assert [line.split()[0] for line in plain] == [
        f"iscsi://{portal.name}/{IQN}",
        f"iscsi://{target.listen}/{IQN}",
    ]
    probed = good("discover", where, "--probe").splitlines()[1:]
    assert [line.split()[0] for line in probed] == [
        f"iser://{target.listen}/{IQN}",
        f"iscsi://{portal.name}/{IQN}",
    ]
    assert "takes iSER" in probed[0] and "no iSER" in probed[1]


def test_a_portal_without_iser_is_asked_by_tcp(portal: Portal) -> None:
    """With HOST:PORT alone the portal is asked over TCP. Its address is used for a target that the
    answer gives without one."""
    done = iserblk("discover", portal.name)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].split() == [f"iscsi://{portal.name}/{IQN}", "own", "subnet"]
    (warning,) = done.stderr.splitlines()
    assert "Traditional iSCSI is used" in warning and "no MPA Reply" in warning
    assert (portal.mpa, portal.logins, portal.asked) == (1, 1, ["All"])


def test_discovery_on_the_transport_of_iscsi(target: TargetProcess, portal: Portal) -> None:
    """An iscsi:// URL: the login is a byte stream from the first byte on, iSER is not tried, and
    the keys of iSER are not spoken of; so at a portal that knows nothing of iSER, and at ours.
    (HOST alone is asked over iSER first, as running targets take it there.)

    proves: ISER-5.1-7, ISER-GEN-3.3-1, ISER-IB00-3.1.6.1-3
    """
    assert IQN in good("discover", f"iscsi://{portal.name}")
    assert (portal.mpa, portal.logins, portal.asked) == (0, 1, ["All"])
    with spying(target.port) as spy:
        assert IQN in good("discover", f"iscsi://127.0.0.1:{spy.port}")
    for said in (spy.asked, spy.answered):
        assert b"RDMAExtensions" not in said and b"MPA ID" not in said
    assert spy.asked[0] & 0x3F == LOGIN_REQUEST and b"SessionType=Discovery\0" in spy.asked
    assert spy.answered[0] == LOGIN_RESPONSE and b"TargetName=" + IQN.encode() in spy.answered


def test_an_iser_url_means_iser() -> None:
    with portals(1, lambda: Portal(slam=True)) as (portal,):
        assert f"write iscsi://{portal.name} in" in bad(4, "discover", f"iser://{portal.name}")
        assert (portal.mpa, portal.logins) == (1, 1)  # the login asks what it speaks


def test_long_answers(portal: Portal) -> None:
    """Answers of several Text Responses, cut anywhere; IPv6 addresses, tags and types."""
    text = encode(
        pair
        for number in range(500)
        for pair in (
            ("TargetName", f"{IQN}{number}"),
            ("TargetAddress", "[2001:db8::1]:860,7"),
            ("TargetAddress", "192.0.2.1,8,3"),
        )
    )
    portal.answer = [text[at : at + 8191] for at in range(0, len(text), 8191)]
    assert len(portal.answer) > 4
    report = good_json("discover", f"iscsi://{portal.name}")
    assert [each["name"] for each in report["targets"]] == [f"{IQN}{n}" for n in range(500)]
    one, two = report["targets"][3]["portals"]
    assert one == {
        "url": f"iser://192.0.2.1:3260/{IQN}3",
        "host": "192.0.2.1",
        "port": 3260,
        "group": 8,
        "group_type": "InfiniBand",
        "iser": True,
        "own_subnet": is_near("192.0.2.1", local_networks()),
        "needs_interface": False,
    }
    assert (two["url"], two["group"]) == (f"iscsi://[2001:db8::1]:860/{IQN}3", 7)


def test_ipv6() -> None:
    try:
        made = Portal("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error.strerror}")
    with portals(1, lambda: made) as (portal,):
        assert f"iscsi://{portal.name}/{IQN}" in good("discover", f"iscsi://{portal.name}")


def test_one_target(target: TargetProcess) -> None:
    assert IQN in good("discover", f"{target.url}")
    assert "does not know" in bad(21, "discover", target.url.replace(IQN, OTHER))


def test_no_targets(portal: Portal) -> None:
    portal.answer = [b""]
    where = f"iscsi://{portal.name}"
    assert good("discover", where) == f"{where} knows no targets for this initiator\n"
    assert good_json("discover", where) == {"source": where, "targets": [], "left_out": []}


def test_nonsense_is_an_error(portal: Portal) -> None:
    portal.answer = [encode([("TargetAddress", "somewhere,1")])]
    assert "'somewhere,1'" in bad(4, "discover", f"iscsi://{portal.name}")


@pytest.mark.parametrize(
    "odd", ["somewhere:x,1", "[fe80::1%eth0,1", "user@host,1", "192.0.2.1:70000,1"]
)
def test_one_bad_address_does_not_hide_the_others(odd: str, portal: Portal) -> None:
    """It is named, and the status says that something is missing."""
    names = [f"{IQN}{number}" for number in range(10)]
    portal.answer = [
        encode(
            pair
            for number, name in enumerate(names)
            for pair in (
                ("TargetName", name),
                ("TargetAddress", odd if number == 4 else f"{portal.name},1"),
            )
        )
    ]
    where = f"iscsi://{portal.name}"
    done = iserblk("discover", where)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"iserblk: left out: TargetAddress {odd!r}: ")
    assert [line for line in done.stdout.splitlines() if line[0] != " "] == names
    done = iserblk("discover", where, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert [each["name"] for each in report["targets"]] == names
    (words,) = report["left_out"]
    assert words.startswith("TargetAddress ")


@pytest.mark.parametrize("tag", [jiva.PORTAL_GROUP, 65536, "x", "", "1 "])
def test_a_portal_group_that_is_none_does_no_harm(tag: object, portal: Portal) -> None:
    portal.group = tag if isinstance(tag, int) else 1
    portal.answer = [encode([("TargetName", IQN), ("TargetAddress", f"{portal.name},{tag}")])]
    assert f"iscsi://{portal.name}/{IQN}" in good("discover", f"iscsi://{portal.name}")


def test_link_local_portals_come_last(portal: Portal) -> None:
    addresses = (*scst.LINK_LOCAL, f"{portal.name},1", "[fe80::3],1,3")
    pairs = [("TargetName", IQN), *(("TargetAddress", each) for each in addresses)]
    portal.answer = [encode(pairs)]
    where = f"iscsi://{portal.name}"
    first, *others = good("discover", where, "--probe").splitlines()[1:]
    assert first.startswith(f"  {where}/{IQN} ")
    assert len(others) == 3
    assert all(line.endswith("link-local, unusable without %INTERFACE") for line in others)
    ways = good_json("discover", where)["targets"][0]["portals"]
    assert [way["needs_interface"] for way in ways] == [False, True, True, True]


@pytest.mark.parametrize(
    ("host", "words"),
    [("fe80::1", "write [fe80::1%INTERFACE]"), ("fe80::1%none0", "is there an interface none0")],
)
def test_a_link_local_address_needs_an_interface(host: str, words: str) -> None:
    for command in ("discover", "info"):
        assert words in bad(23, command, f"iscsi://[{host}]:3260/{IQN}")


def test_errors(target: TargetProcess) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{reserved.getsockname()[1]}"
        refused = f"cannot connect to {nobody}: Connection refused; is the target listening there?"
        assert bad(4, "discover", nobody) == f"iserblk: {refused}"
        assert "Connection refused" in bad(4, "discover", f"iscsi://{nobody}")
    assert "write HOST[:PORT], or a URL" in bad(7, "discover", "host/iqn")
    assert "cannot resolve" in bad(23, "discover", "iscsi://nowhere.invalid")
    assert "PORTAL|URL" in bad(7, "discover")


def test_chap(tmp_path: Path) -> None:
    """Discovery takes credentials as other commands do."""
    accounts, secret = tmp_path / "accounts", tmp_path / "secret"
    for path, text in ((accounts, "me:0123456789abcdef\n"), (secret, "0123456789abcdef\n")):
        path.write_text(text)
        path.chmod(0o600)
    arguments = ("target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--chap-accounts", accounts)
    with serving(*arguments, "--lun", f"{tmp_path}/lun:size=1M", log=tmp_path / "log") as server:
        listen = server.url.removeprefix("iser://").partition("/")[0]
        for scheme in ("iser", "iscsi"):
            url = f"{scheme}://me@{listen}"
            assert IQN in good("discover", url, "--chap-secret-file", secret)
            assert "authentication" in bad(24, "discover", f"{scheme}://{listen}")

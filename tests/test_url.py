"""URLs: what they say, and every way in which they can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import BadArgument, NotSupported
from iserblk.options import Options
from iserblk.secret import Secret
from iserblk.url import Url, check_scheme, parse_place, parse_url, split_url

IQN = "iqn.2026-11.example:disk"
SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIBISCSI_CHAP_USERNAME", "LIBISCSI_CHAP_PASSWORD"):
        monkeypatch.delenv(name, raising=False)


# shows: SYSTEM-52
@pytest.mark.parametrize(
    ("text", "host", "port", "iqn", "lun"),
    [
        (f"iser://host/{IQN}", "host", 3260, IQN, None),
        (f"iser://host/{IQN}/0", "host", 3260, IQN, 0),
        (f"iser://host:860/{IQN}/16383", "host", 860, IQN, 16383),
        (f"iser://10.1.2.3:65535/{IQN}/007", "10.1.2.3", 65535, IQN, 7),
        (f"iser://[::1]/{IQN}/1", "::1", 3260, IQN, 1),
        (f"iser://[2001:DB8::1]:3261/{IQN}/1", "2001:DB8::1", 3261, IQN, 1),
        (f"iser://[fe80::1%eth0]:3261/{IQN}/1", "fe80::1%eth0", 3261, IQN, 1),
        (f"ISER://a-b.example.com./{IQN}/1", "a-b.example.com.", 3260, IQN, 1),
        ("iser://h/eui.02004567A425678D/1", "h", 3260, "eui.02004567A425678D", 1),
        ("iser://h/naa.52004567BA64678D", "h", 3260, "naa.52004567BA64678D", None),
        (f"iser://h/{IQN.replace(':', '%3a')}/2", "h", 3260, IQN, 2),
        (f"iscsi://h/{IQN}/2?iser", "h", 3260, IQN, 2),  # libiscsi's other way
        (f"iscsi://h/{IQN}/2?iser=1", "h", 3260, IQN, 2),
        ("iser://bücher.example/iqn.2026-11.x:größe", "bücher.example", 3260,
         "iqn.2026-11.x:größe", None),
    ],
)  # fmt: skip
def test_addresses(text: str, host: str, port: int, iqn: str, lun: int | None) -> None:
    assert parse_url(text) == Url(scheme="iser", host=host, port=port, iqn=iqn, lun=lun)


def test_options_of_a_url() -> None:
    url = parse_url(f"iser://h/{IQN}/0?queue-depth=8&io_timeout=5&x=a=b")
    assert url.options == {"queue-depth": "8", "io-timeout": "5", "x": "a=b"}


@pytest.mark.parametrize(
    ("info", "user", "password"),
    [
        ("u", "u", ""),
        ("u%p", "u", "p"),
        ("u:p", "u", "p"),
        ("u%p:q", "u", "p:q"),
        ("u:p%41", "u", "p%41"),  # not percent-decoded
        ("u%p@q@r", "u", "p@q@r"),  # the last @ ends it
        ("u%p?q&r=s#t", "u", "p?q&r=s#t"),
        ("u%", "u", ""),
    ],
)
def test_user_info(info: str, user: str, password: str) -> None:
    url = split_url(f"iser://{info}@host:1/{IQN}/3?queue-depth=1")
    assert (url.user, url.password.reveal()) == (user, password)
    assert (url.host, url.port, url.iqn, url.lun) == ("host", 1, IQN, 3)
    assert url.options == {"queue-depth": "1"}


# Every text is wrong in one way; the words say which. No text may show what follows "s3cr3t".
WRONG = [
    ("", "no scheme"),
    ("disk.img", "no scheme"),
    ("/dev/sdb", "no scheme"),
    (f"//host/{IQN}", "no scheme"),
    (f"iser:/host/{IQN}", "the // behind its scheme is missing"),
    (f"iscsi:host/{IQN}", "the // behind its scheme is missing"),
    (f"http://host/{IQN}", "unknown scheme 'http'"),
    (f"://host/{IQN}", "unknown scheme in front"),
    ("iser://", "no host"),
    (f"iser:///{IQN}/0", "no host"),
    (f"iser://:3260/{IQN}/0", "no host"),
    ("iser://host", "no target; `iserblk discover iser://HOST` lists"),
    ("ISCSI://host", "no target; `iserblk discover iscsi://HOST` lists"),
    ("iser://host/", "no target"),
    ("iser://host/?queue-depth=1", "no target"),
    ("iser://host?queue-depth=1", "no target"),
    (f"iser://host name/{IQN}", "no host name has"),
    (f"iser://-host/{IQN}", "no host name has"),
    (f"iser://host\n/{IQN}", "no host name has"),
    (f"iser://host\\x/{IQN}", "no host name has"),
    (f"iser://host:/{IQN}", "port is not a number"),
    (f"iser://host:0/{IQN}", "port is not a number"),
    (f"iser://host:65536/{IQN}", "port is not a number"),
    (f"iser://host:-1/{IQN}", "port is not a number"),
    (f"iser://host:iscsi/{IQN}", "port is not a number"),
    (f"iser://host:٣/{IQN}", "port is not a number"),
    (f"iser://::1/{IQN}", "brackets"),
    (f"iser://[::1/{IQN}", "without ]"),
    (f"iser://[::1]3260/{IQN}", "behind ]"),
    (f"iser://[::1]:/{IQN}", "port is not a number"),
    (f"iser://[host]/{IQN}", "no IPv6 address"),
    (f"iser://[]/{IQN}", "no IPv6 address"),
    ("iser://host/0", "target name '0' is no iSCSI name"),
    ("iser://host/disk", "is no iSCSI name"),
    ("iser://host/iqn.2026.example:disk", "is no iSCSI name"),
    ("iser://host/iqn.2026-11", "is no iSCSI name"),
    ("iser://host/iqn.2026-11.", "is no iSCSI name"),
    ("iser://host/iqn.2026-11.x:", "is no iSCSI name"),
    ("iser://host/iqn.2026-11.x:a%20b", "is no iSCSI name"),
    ("iser://host/iqn.2026-11.x:a%00", "is no iSCSI name"),
    ("iser://host/eui.123", "is no iSCSI name"),
    ("iser://host/naa.1234567890abcdefX", "is no iSCSI name"),
    ("iser://host/iqn.2026-11.x:" + "y" * 230, "at most 223"),
    (f"iser://host/{IQN}/", "has no LUN; add its number"),
    (f"iser://host/{IQN}/one", "LUN 'one'"),
    (f"iser://host/{IQN}/-1", "LUN '-1'"),
    (f"iser://host/{IQN}/16384", "LUN '16384'"),
    (f"iser://host/{IQN}/1.5", "LUN '1.5'"),
    (f"iser://host/{IQN}/0/0", "LUN '0/0'"),
    (f"iser://host/{IQN}/٣", "LUN"),
    (f"iser://host/{IQN}/999999999999999999999", "LUN"),
    (f"iser://host/{IQN}/0?", "empty option"),
    (f"iser://host/{IQN}\udcff/0", "is no iSCSI name"),  # a byte that is none of UTF-8
    (f"iser://host/{IQN}/0?&queue-depth=1", "empty option"),
    (f"iser://host/{IQN}/0?queue-depth=1&", "empty option"),
    (f"iser://host/{IQN}/0?=1", "empty option"),
    (f"iser://host/{IQN}/0?queue-depth=1&queue_depth=2", "queue-depth' is given twice"),
    (f"iser://@host/{IQN}", "without a user"),
    (f"iser://%{SECRET}@host/{IQN}", "without a user"),
    (f"iser://u%{SECRET}@/{IQN}", "no host"),
    # The @, or a character of the password, is in the wrong place.
    (f"iser://u:{SECRET}/{IQN}", "port is not a number"),
    (f"iser://u%{SECRET}/{IQN}", "no host name has"),
    (f"iser://u%a/{SECRET}@host/{IQN}", "no host name has"),
    (f"iser://u/{SECRET}@host/{IQN}", "target name .not shown. is no iSCSI name"),
    (f"iser://u/{IQN}/{SECRET}@host", "LUN .not shown."),
    (f"u%{SECRET}@host://{IQN}", "unknown scheme in front"),
    (f"u%{SECRET}@host/{IQN}", "no scheme"),
]


# shows: SYSTEM-52
@pytest.mark.parametrize(("text", "words"), WRONG)
def test_wrong(text: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words) as error:
        parse_url(text)
    said = str(error.value)
    assert SECRET not in said
    assert "\n" not in said and len(said) < 300
    assert error.value.exit_status == 7


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"iser://u%{SECRET}@h/{IQN}/3?target_password={SECRET}", f"iser://h:3260/{IQN}/3"),
        (f"iser://{SECRET}@[::1]:1/{IQN}", f"iser://[::1]:1/{IQN}"),
    ],
)
def test_redacted(text: str, shown: str) -> None:
    url = split_url(text)
    assert url.redacted() == shown
    assert split_url(shown).redacted() == shown
    assert SECRET not in repr(url) and SECRET not in str(url)


def test_secret() -> None:
    secret = Secret(SECRET)
    for said in (str(secret), repr(secret), f"{secret}", "%s" % secret, f"{[secret]!r}"):  # noqa: UP031
        assert SECRET not in said and "***" in said
    assert secret.reveal() == SECRET
    assert secret == Secret(SECRET) and secret != Secret("other") and secret != SECRET
    assert secret and not Secret()
    assert len({secret, Secret(SECRET), Secret("other")}) == 2


@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    for candidate in (text, f"iser://{text}", f"iser://h/{IQN}/{text}", f"iser://h/{IQN}?{text}"):
        try:
            url = parse_url(candidate)
        except (BadArgument, NotSupported) as error:
            assert "\n" not in str(error)
        else:
            assert 1 <= url.port <= 65535 and url.host and url.iqn


@given(st.text(min_size=1, max_size=20).filter(lambda text: "/" not in text))
def test_any_user_info_is_never_shown(info: str) -> None:
    """No error or text depends on what stands in front of the @."""
    marked = f"{SECRET}{info}"
    try:
        url = split_url(f"iser://{marked}@host/{IQN}/x")
    except BadArgument as error:
        assert SECRET not in str(error)
    else:
        raise AssertionError(f"LUN x was taken: {url}")


# -- where targets are told of -------------------------------------------------------------------


def test_servers_and_agents() -> None:
    for text, host, port, iqn in (
        ("isns://host", "host", 3205, ""),
        ("slp://host", "host", 427, ""),
        (f"slp://[::1]:5/{IQN}", "::1", 5, IQN),
        ("slp://", "", 427, ""),
        (f"slp:///{IQN}?scope=a,b", "", 427, IQN),
        ("SLP://?scope=a", "", 427, ""),
    ):
        url = parse_place(text)
        assert (url.host, url.port, url.iqn) == (host, port, iqn)
    assert parse_place("slp://?scope=a,b").options == {"scope": "a,b"}
    with pytest.raises(BadArgument, match=r"no host; write isns://HOST"):
        parse_place("isns://")
    for wrong in ("isns://", "slp://:427", "slp://host:0"):
        with pytest.raises(BadArgument):
            parse_place(wrong)
    with pytest.raises(BadArgument, match="unknown scheme"):
        parse_url(f"slp://host/{IQN}/0")


# -- options of the other scheme ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "key", "value", "words"),
    [
        ("iser", "header-digest", "crc32c", "mpa-crc=yes"),
        ("iser", "data-digest", "CRC32C,None", "mpa-crc=yes"),
        ("iscsi", "rcap", "verbs", "means TCP"),
        ("iscsi", "rcap", "iwarp", "means TCP"),
        ("iscsi", "header", "12", "without iSER's messages"),
        ("iscsi", "hello", "yes", "without iSER's messages"),
    ],
)
def test_options_of_the_other_scheme(scheme: str, key: str, value: str, words: str) -> None:
    url = parse_url(f"{scheme}://host/{IQN}/0")
    with pytest.raises(NotSupported, match=words):
        check_scheme(url, Options.from_pairs([(key, value)]))
    check_scheme(url, Options())
    other = parse_url(f"{'iser' if scheme == 'iscsi' else 'iscsi'}://host/{IQN}/0")
    check_scheme(other, Options.from_pairs([(key, value)]))

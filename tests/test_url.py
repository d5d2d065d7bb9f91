"""URLs and options: what they say, and every way in which they can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import BadArgument, NotSupported
from iserblk.options import OPTION_NAMES, Options, parse_size
from iserblk.secret import Secret
from iserblk.url import Url, check_scheme, parse_url, split_url

IQN = "iqn.2026-11.example:disk"
SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIBISCSI_CHAP_USERNAME", "LIBISCSI_CHAP_PASSWORD"):
        monkeypatch.delenv(name, raising=False)


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
    (f"iser:/host/{IQN}", "no scheme"),
    (f"http://host/{IQN}", "unknown scheme 'http'"),
    (f"://host/{IQN}", "unknown scheme in front"),
    ("iser://", "no host"),
    (f"iser:///{IQN}/0", "no host"),
    (f"iser://:3260/{IQN}/0", "no host"),
    ("iser://host", "no target"),
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
    (f"iser://host/{IQN}/", "without a LUN"),
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
    """Whatever stands in front of the @, errors and texts say nothing that depends on it."""
    marked = f"{SECRET}{info}"
    try:
        url = split_url(f"iser://{marked}@host/{IQN}/x")
    except BadArgument as error:
        assert SECRET not in str(error)
    else:
        raise AssertionError(f"LUN x was taken: {url}")


# -- options -------------------------------------------------------------------------------------


def test_defaults() -> None:
    """As the design and the documentation say."""
    options = Options.from_pairs([])
    assert options == Options(
        rcap="auto",
        mpa_crc=True,
        initiator_name="",
        io_timeout=30.0,
        queue_depth=128,
        immediate_data=True,
    )


@pytest.mark.parametrize(
    ("key", "value", "field", "result"),
    [
        ("rcap", "auto", "rcap", "auto"),
        ("rcap", "verbs", "rcap", "verbs"),
        ("rcap", "iwarp", "rcap", "iwarp"),
        ("mpa-crc", "no", "mpa_crc", False),
        ("mpa_crc", "yes", "mpa_crc", True),
        ("mpa-frames", "1", "mpa_frames", 1),
        ("mpa_frames", "64", "mpa_frames", 64),
        ("initiator-name", IQN, "initiator_name", IQN),
        ("io-timeout", "5", "io_timeout", 5.0),
        ("io_timeout", "1.5s", "io_timeout", 1.5),
        ("queue-depth", "1", "queue_depth", 1),
        ("queue-depth", "1024", "queue_depth", 1024),
        ("busy-poll", "0", "busy_poll_us", 0),
        ("busy_poll", "1000000", "busy_poll_us", 1_000_000),
        ("immediate-data", "yes", "immediate_data", True),
        ("immediate-data", "no", "immediate_data", False),
        ("journal", "off", "journal", 0),
        ("journal", "64k", "journal", 65536),
        ("shared", "yes", "shared", True),
        ("portals", "discover", "discover", True),
    ],
)
def test_values(key: str, value: str, field: str, result: object) -> None:
    assert getattr(Options.from_pairs([(key, value)]), field) == result


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("style", "cm"),
        ("header", "28"),
        ("mpa-frames", "auto"),
        ("fallback", "none"),
        ("journal", "64M"),
        ("shared", "no"),
        ("reserve", "none"),
        ("header_digest", "none"),
        ("data-digest", "NONE"),
        ("portals", "given"),
    ],
)
def test_what_happens_anyway(key: str, value: str) -> None:
    assert Options.from_pairs([(key, value)]) == Options()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("portals", "all", "portals='all': say given or discover"),
        ("colour", "red", "unknown option 'colour'; known are: .*io-timeout.*queue-depth"),
        ("", "x", "unknown option"),
        ("rcap", "", "rcap has no value"),
        ("rcap", "tcp", "say auto, verbs or iwarp"),
        ("mpa-crc", "maybe", "say yes or no"),
        ("mpa-frames", "0", "say auto, or a number of segments from 1 to 64"),
        ("mpa-frames", "65", "say auto, or a number"),
        ("mpa-frames", "large", "say auto, or a number"),
        ("immediate-data", "2", "say yes or no"),
        ("shared", "perhaps", "say yes or no"),
        ("io-timeout", "0", "seconds"),
        ("io-timeout", "nan", "seconds"),
        ("io-timeout", "inf", "seconds"),
        ("io-timeout", "-3", "seconds"),
        ("io-timeout", "soon", "seconds"),
        ("io-timeout", "86401", "seconds"),
        ("queue-depth", "0", "from 1 to 1024"),
        ("queue-depth", "1025", "from 1 to 1024"),
        ("queue-depth", "1000000000000", "from 1 to 1024"),
        ("queue-depth", "0000000012000000", "from 1 to 1024"),
        ("busy-poll", "0000000012000000", "from 0 .never. to 1000000"),
        ("initiator-name", f"{IQN}\udcff", "is no iSCSI name"),
        ("queue-depth", "٣", "from 1 to 1024"),
        ("queue-depth", "1e2", "from 1 to 1024"),
        ("initiator-name", "me", "is no iSCSI name"),
        ("initiator-name", "iqn.2026-11.x:a b", "is no iSCSI name"),
        ("style", "rdma", "say cm"),
        ("header", "20", "say 28"),
        ("fallback", "nfs", "say none"),
        ("journal", "big", "say off"),
        ("journal", "4096", "64k or more"),
        ("journal", "0", "say off"),
        ("reserve", "shared", "say none or exclusive"),
        ("reserve-key", "1", "from 0x1 to 0xf"),
        ("reserve-key", "0x0", "from 0x1 to 0xf"),
        ("reserve-key", "0x1" + "0" * 16, "from 0x1 to 0xf"),
        ("reserve-key", "0x_1", "from 0x1 to 0xf"),
        ("reserve-key", "0x1", "without reserve=exclusive"),
        ("header-digest", "md5", "say none"),
        ("data-digest", "crc16", "say none"),
    ],
)
def test_wrong_options(key: str, value: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        Options.from_pairs([(key, value)])


def test_reserve() -> None:
    assert Options.from_pairs([("reserve", "Exclusive")]) == Options(reserve=True)
    pairs = [("reserve_key", "0xFEEDbeef00000001"), ("reserve", "exclusive")]
    assert Options.from_pairs(pairs) == Options(reserve=True, reserve_key=0xFEEDBEEF00000001)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("style", "stream", "only style=cm"),
        ("header", "12", "only header=28"),
    ],
)
def test_options_that_come_later(key: str, value: str, words: str) -> None:
    """Each says what to do instead; none shows a value that may be a secret."""
    with pytest.raises(NotSupported, match=words) as error:
        Options.from_pairs([(key, value)])
    assert SECRET not in str(error.value)
    assert key.replace("_", "-").partition("=")[0] in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("chap-secret-file", SECRET, "from / on"),
        ("chap_secret_fd", SECRET, "number of an open"),
        ("chap-secret-fd", "-1", "number of an open"),
        ("chap-secret-credential", f"../{SECRET}", "no path"),
        ("auth", SECRET, "say none, chap, md5"),
    ],
)
def test_wrong_options_of_chap(key: str, value: str, words: str) -> None:
    """None shows its value, which may be a secret in the wrong place."""
    with pytest.raises(BadArgument, match=words) as error:
        Options.from_pairs([(key, value)])
    assert SECRET not in str(error.value)


def test_options_show_no_secret() -> None:
    options = Options.from_pairs([("target_password", SECRET), ("target_user", "disk")])
    assert SECRET not in repr(options) and options.target_password.reveal() == SECRET


def test_option_twice() -> None:
    with pytest.raises(BadArgument, match="queue-depth is given twice"):
        Options.from_pairs([("queue-depth", "1"), ("queue_depth", "1")])


@pytest.mark.parametrize(
    ("scheme", "key", "value", "words"),
    [
        ("iser", "header-digest", "crc32c", "mpa-crc=yes"),
        ("iser", "data-digest", "CRC32C,None", "mpa-crc=yes"),
        ("iscsi", "rcap", "verbs", "means TCP"),
        ("iscsi", "rcap", "iwarp", "means TCP"),
    ],
)
def test_options_of_the_other_scheme(scheme: str, key: str, value: str, words: str) -> None:
    url = parse_url(f"{scheme}://host/{IQN}/0")
    with pytest.raises(NotSupported, match=words):
        check_scheme(url, Options.from_pairs([(key, value)]))
    check_scheme(url, Options())
    other = parse_url(f"{'iser' if scheme == 'iscsi' else 'iscsi'}://host/{IQN}/0")
    check_scheme(other, Options.from_pairs([(key, value)]))


@pytest.mark.parametrize(
    ("value", "text"),
    [("crc32c", "CRC32C"), ("CRC32C,none", "CRC32C,None"), ("none,crc32c", "None,CRC32C")],
)
def test_digests(value: str, text: str) -> None:
    options = Options.from_pairs([("header_digest", value), ("data_digest", "none")])
    assert (options.header_digest, options.data_digest) == (text, "None")


def test_every_option_of_the_design_is_known() -> None:
    assert set(OPTION_NAMES) >= {
        "rcap",
        "style",
        "header",
        "mpa-crc",
        "initiator-name",
        "io-timeout",
        "queue-depth",
        "fallback",
        "journal",
        "shared",
        "reserve",
        "reserve-key",
        "chap-secret-file",
        "chap-secret-fd",
        "chap-secret-credential",
        "immediate-data",
        "target-user",
        "target-password",
        "header-digest",
        "data-digest",
        "auth",
    }


@given(st.sampled_from(OPTION_NAMES), st.text(max_size=30))
def test_any_value(key: str, value: str) -> None:
    try:
        Options.from_pairs([(key, value)])
    except (BadArgument, NotSupported) as error:
        assert key in str(error) or "unknown" in str(error)


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("4k", 4096), ("64M", 64 << 20), ("1G", 1 << 30), ("2t", 2 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "size") == size


@pytest.mark.parametrize("text", ["", "M", "1.5G", "-1", "1GB", "1 G", "٣", "9" * 20, "0x10"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(BadArgument, match="give a size such as"):
        parse_size(text, "size")

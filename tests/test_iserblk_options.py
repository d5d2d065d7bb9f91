"""Options: the values that each takes, the errors of the others, and sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import BadArgument, NotSupported
from iserblk.options import OPTION_NAMES, PORTAL, Options, parse_size

IQN = "iqn.2026-11.example:disk"
SECRET = "s3cr3t"


def test_defaults() -> None:
    """The defaults are those of docs/options.md."""
    options = Options.from_pairs([])
    assert options == Options(
        rcap="auto",
        mpa_crc=True,
        initiator_name="",
        io_timeout=30.0,
        queue_depth=128,
        journal=56 << 20,
        busy_poll_us=1000,
        immediate_data=True,
        unsolicited_data="auto",
        header_digest="None",
        data_digest="None",
        fallback="none",
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
        ("isid", "80a1b2C3d4e5", "isid", bytes.fromhex("80a1b2c3d4e5")),
        ("io-timeout", "5", "io_timeout", 5.0),
        ("io-timeout", "5", "command_timeout", 5.0),
        ("io-timeout", "180/30", "io_timeout", 180.0),
        ("io-timeout", "180/30", "command_timeout", 30.0),
        ("io-timeout", "180s/2.5s", "command_timeout", 2.5),
        ("io-timeout", "forever", "io_timeout", math.inf),
        ("io-timeout", "Forever", "command_timeout", 30.0),
        ("io-timeout", "forever/90", "command_timeout", 90.0),
        ("io_timeout", "1.5s", "io_timeout", 1.5),
        ("max-transfer", "512", "max_transfer", 512),
        ("max_transfer", "64k", "max_transfer", 65536),
        ("max-transfer", "1M", "max_transfer", 1 << 20),
        ("queue-depth", "1", "queue_depth", 1),
        ("queue-depth", "1024", "queue_depth", 1024),
        ("connections", "1", "connections", 1),
        ("connections", "8", "connections", 8),
        ("error_recovery_level", "0", "error_recovery_level", 0),
        ("error-recovery-level", "2", "error_recovery_level", 2),
        ("busy-poll", "0", "busy_poll_us", 0),
        ("busy_poll", "1000000", "busy_poll_us", 1_000_000),
        ("immediate-data", "yes", "immediate_data", True),
        ("immediate-data", "no", "immediate_data", False),
        ("unsolicited-data", "AUTO", "unsolicited_data", "auto"),
        ("unsolicited_data", "on", "unsolicited_data", "yes"),
        ("unsolicited-data", "no", "unsolicited_data", "no"),
        ("journal", "off", "journal", 0),
        ("journal", "64k", "journal", 65536),
        ("shared", "yes", "shared", True),
        ("portals", "discover", "discover", PORTAL),
        ("alua", "Follow", "alua", "follow"),
        ("fallback", "iSCSI", "fallback", "iscsi"),
        ("auth", "SHA3256", "auth", "sha3-256"),
        ("auth", "sha-256", "auth", "sha256"),
        ("target-user", "disk", "target_user", "disk"),
        ("chap-secret-file", "/etc/secret", "chap_secret_file", "/etc/secret"),
        ("chap_secret_fd", "3", "chap_secret_fd", 3),
        ("chap-secret-credential", "disk.chap", "chap_secret_credential", "disk.chap"),
        ("metrics", "/run/disk", "metrics", "/run/disk"),
        ("metrics", "127.0.0.1:9100", "metrics", "127.0.0.1:9100"),
    ],
)
def test_values(key: str, value: str, field: str, result: object) -> None:
    assert getattr(Options.from_pairs([(key, value)]), field) == result


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("style", "auto"),
        ("header", "28"),
        ("mpa-frames", "auto"),
        ("fallback", "none"),
        ("journal", "56M"),
        ("shared", "no"),
        ("reserve", "none"),
        ("header_digest", "none"),
        ("data-digest", "NONE"),
        ("portals", "given"),
        ("alua", "ask"),
        ("metrics", "OFF"),
        ("metrics", "no"),
    ],
)
def test_what_happens_anyway(key: str, value: str) -> None:
    assert Options.from_pairs([(key, value)]) == Options()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("portals", "all", "portals='all': say given, discover, isns://HOST"),
        ("alua", "no", "alua='no': say ask or follow"),
        ("colour", "red", "unknown option 'colour'; the options are: .*io-timeout.*queue-depth"),
        ("io_timeuot", "3", "unknown option 'io_timeuot': is it io-timeout?"),
        ("", "x", "unknown option"),
        ("rcap", "", "rcap has no value"),
        ("rcap", "tcp", "say auto, verbs, iwarp or iwarp-sctp"),
        ("mpa-crc", "maybe", "say yes or no"),
        ("mpa-frames", "0", "say auto, or a number of segments from 1 to 64"),
        ("mpa-frames", "65", "say auto, or a number"),
        ("mpa-frames", "large", "say auto, or a number"),
        ("immediate-data", "2", "say yes or no"),
        ("unsolicited-data", "often", "say auto, yes or no"),
        ("shared", "perhaps", "say yes or no"),
        ("isid", "80a1b2c3d4e", "12 hexadecimal digits"),
        ("isid", "80a1b2c3d4eg", "12 hexadecimal digits"),
        ("io-timeout", "0", "seconds"),
        ("io-timeout", "nan", "seconds"),
        ("io-timeout", "inf", "seconds"),
        ("io-timeout", "-3", "seconds"),
        ("io-timeout", "soon", "seconds"),
        ("io-timeout", "86401", "seconds"),
        ("io-timeout", "ever", "seconds, from 1 to 86400, or forever"),
        ("io-timeout", "180/", "seconds"),
        ("io-timeout", "/30", "seconds"),
        ("io-timeout", "180/0.5", "seconds"),
        ("io-timeout", "180/forever", "seconds"),
        ("io-timeout", "180/30/5", "seconds"),
        ("io-timeout", "30/60", "behind the slash, is longer than that for a request"),
        ("max-transfer", "511", "from 512 to 1M"),
        ("max-transfer", "2M", "from 512 to 1M"),
        ("max-transfer", "off", "from 512 to 1M"),
        ("queue-depth", "0", "from 1 to 1024"),
        ("queue-depth", "1025", "from 1 to 1024"),
        ("queue-depth", "1000000000000", "from 1 to 1024"),
        ("queue-depth", "0000000012000000", "from 1 to 1024"),
        ("connections", "0", "from 1 to 8"),
        ("connections", "9", "from 1 to 8"),
        ("connections", "many", "from 1 to 8"),
        ("error-recovery-level", "3", "say 0, 1 or 2"),
        ("error-recovery-level", "two", "say 0, 1 or 2"),
        ("busy-poll", "0000000012000000", "from 0 .never. to 1000000"),
        ("initiator-name", f"{IQN}\udcff", "is no iSCSI name"),
        ("queue-depth", "٣", "from 1 to 1024"),
        ("queue-depth", "1e2", "from 1 to 1024"),
        ("initiator-name", "me", "is no iSCSI name"),
        ("initiator-name", "iqn.2026-11.x:a b", "is no iSCSI name"),
        ("style", "rdma", "say auto, cm or stream"),
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
        ("metrics", "somewhere", "give the whole path of a Unix socket"),
        ("data-digest", "crc16", "say none"),
    ],
)
def test_wrong_options(key: str, value: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        Options.from_pairs([(key, value)])


def test_the_specifications_own_messages() -> None:
    assert Options.from_pairs([("header", "12")]) == Options(header=12)
    assert Options.from_pairs([("header", "28"), ("hello", "no")]) == Options()
    assert Options.from_pairs([("header", "12"), ("hello", "yes")]) == Options(
        header=12, hello=True
    )
    with pytest.raises(BadArgument, match="say 28 or 12"):
        Options.from_pairs([("header", "16")])
    with pytest.raises(BadArgument, match="always begin with a Hello"):
        Options.from_pairs([("header", "12"), ("hello", "no")])


def test_reserve() -> None:
    assert Options.from_pairs([("reserve", "Exclusive")]) == Options(reserve=True)
    pairs = [("reserve_key", "0xFEEDbeef00000001"), ("reserve", "exclusive")]
    assert Options.from_pairs(pairs) == Options(reserve=True, reserve_key=0xFEEDBEEF00000001)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("chap-secret-file", SECRET, "beginning with /"),
        ("chap_secret_fd", SECRET, "number of an open"),
        ("chap-secret-fd", "-1", "number of an open"),
        ("chap-secret-credential", f"../{SECRET}", "not a path"),
        ("auth", SECRET, "say none, chap, md5"),
    ],
)
def test_wrong_options_of_chap(key: str, value: str, words: str) -> None:
    """No error shows the value, which may be a secret in the wrong place."""
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
    [
        ("0", 0),
        ("4096", 4096),
        ("4k", 4096),
        ("64M", 64 << 20),
        ("1G", 1 << 30),
        ("2t", 2 << 40),
        ("1.5G", 3 << 29),
        ("0.1k", 102),
        ("1GiB", 1 << 30),
        ("4kB", 4096),
        ("1.25tib", 5 << 38),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "size") == size


@pytest.mark.parametrize(
    "text", ["", "M", "1.5", "1.G", ".5G", "1B", "1Gi", "-1", "1 G", "٣", "9" * 20, "0x10"]
)
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(BadArgument, match="give a size such as"):
        parse_size(text, "size")

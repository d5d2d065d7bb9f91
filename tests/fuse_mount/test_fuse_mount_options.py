"""The options after -o."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse_mount import options
from fuse_mount.errors import UsageError
from fuse_mount.options import parse_options


def test_defaults() -> None:
    settled = parse_options([])
    assert settled.direct_io and not settled.keep_cache
    assert not settled.read_only and not settled.allow_other
    assert settled.umask == 0o022
    assert settled.disk == {}


def test_what_fstab_lines_have_is_swallowed() -> None:
    words = "defaults,_netdev,nofail,noauto,user,noexec,nosuid,nodev,rw,dev,suid,exec,async"
    assert parse_options([words, "x-systemd.automount,x-mine=1,comment=ours"]) == parse_options([])


def test_several_lists_and_the_later_word_wins() -> None:
    settled = parse_options(["ro,uid=7", "gid=8,umask=027,uid=9", "rw,io_timeout=5"])
    assert (settled.read_only, settled.uid, settled.gid, settled.umask) == (False, 9, 8, 0o027)
    assert settled.disk == {"io-timeout": "5"}


@pytest.mark.parametrize(
    ("word", "direct", "keep"),
    [
        ("direct_io", True, False),
        ("auto_cache", False, False),
        ("kernel_cache", False, True),
        ("kernel_cache,direct_io", True, False),
    ],
)
def test_caching(word: str, direct: bool, keep: bool) -> None:
    settled = parse_options([word])
    assert (settled.direct_io, settled.keep_cache) == (direct, keep)


def test_a_comma_in_a_value_is_escaped() -> None:
    settled = parse_options([r"initiator-name=iqn.2026-11.example:a\,b,ro"])
    assert settled.disk == {"initiator-name": "iqn.2026-11.example:a,b"}
    assert settled.read_only


@pytest.mark.parametrize(
    "word",
    ["colour", "colour=blue", "uid=root", "gid=-1", "umask=9", "umask=1777", "io-timeout=soon",
     "sync", "uid", "uid=4294967295", "target_password=hush"],
)  # fmt: skip
def test_what_is_wrong_is_named(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(["ro," + word])
    assert word.partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 1


def test_with_allow_other_a_disk_is_still_its_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.os, "geteuid", lambda: 0)  # type: ignore[attr-defined]
    assert parse_options(["allow_other"]).umask == 0o077
    assert parse_options(["allow_other,umask=0"]).umask == 0


def test_allow_other_needs_the_owners_consent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(options.os, "geteuid", lambda: 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(options, "FUSE_CONF", tmp_path / "fuse.conf")
    with pytest.raises(UsageError, match="user_allow_other"):
        parse_options(["allow_other"])
    (tmp_path / "fuse.conf").write_text("# user_allow_other\n")
    with pytest.raises(UsageError, match="user_allow_other"):
        parse_options(["allow_other"])
    (tmp_path / "fuse.conf").write_text("mount_max = 9\nuser_allow_other\n")
    assert parse_options(["allow_other"]).allow_other


@pytest.mark.parametrize("word", ["alice@loud", "alice%loud@host", "ro,x@loud,uid=7"])
def test_what_may_be_user_info_is_not_shown(word: str) -> None:
    with pytest.raises(UsageError, match="unknown option") as caught:
        parse_options([word])
    assert "loud" not in str(caught.value)

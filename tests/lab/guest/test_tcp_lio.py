"""Our initiator and LIO's target over Traditional iSCSI, with CHAP and digests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iserblk.errors import AuthenticationError, LoginError
from tests.support.blockwork import everything
from tests.support.faces import one_disk
from tests.support.interop import Record

OWN, THEIRS = ("host", "hush-hush-hush"), ("disk", "not-a-word-more")


def configure(chap: str, immediate: str = "Yes") -> None:
    """Set what LIO asks for and offers in the logins that follow."""
    group = Path(os.environ["LAB_TPG"])
    known = group / "acls" / os.environ["LAB_INITIATOR"] / "auth"
    theirs = THEIRS if chap == "mutual" else ("NULL", "NULL")  # which unsets them
    for attribute, value in (
        ("userid", OWN[0]),
        ("password", OWN[1]),
        ("userid_mutual", theirs[0]),
        ("password_mutual", theirs[1]),
    ):
        (known / attribute).write_text(value)
    (group / "attrib" / "authentication").write_text("1")
    (group / "param" / "AuthMethod").write_text("CHAP")
    (group / "param" / "ImmediateData").write_text(immediate)
    (group / "param" / "InitialR2T").write_text("No" if immediate == "Yes" else "Yes")


def with_secrets(
    folder: Path, chap: str, own: str = OWN[1], theirs: str = THEIRS[1]
) -> dict[str, str]:
    """The options that name a file with the secrets of the test."""
    file = folder / "secrets"
    file.write_text(f"{own}\n{theirs}\n" if chap == "mutual" else f"{own}\n")
    file.chmod(0o600)
    return {"chap_secret_file": str(file)}


def as_user(query: str = "") -> str:
    return os.environ["LAB_URL"].replace("iscsi://", f"iscsi://{OWN[0]}@") + query


# shows: SYSTEM-51
@pytest.mark.parametrize(("chap", "immediate"), [("one-way", "Yes"), ("mutual", "No")])
async def test_all_block_operations(
    tmp_path: Path, record: Record, chap: str, immediate: str
) -> None:
    configure(chap, immediate)
    options = {"header_digest": "crc32c", "data_digest": "crc32c", **with_secrets(tmp_path, chap)}
    outcome = await everything(as_user(), options)
    about = outcome.connection
    assert (about["header_digest"], about["data_digest"]) == ("CRC32C", "CRC32C")
    record(
        ours="initiator",
        peer="LIO",
        transport=f"TCP, CRC32C digests, CHAP {chap}, ImmediateData={immediate}",
        outcome=outcome,
    )


# shows: SYSTEM-45
@pytest.mark.parametrize("auth", ["md5", "sha1", "sha256", "sha3-256"])
async def test_each_algorithm(tmp_path: Path, auth: str) -> None:
    configure("mutual")
    secrets = with_secrets(tmp_path, "mutual")
    async with one_disk("async", as_user(f"?auth={auth}"), secrets) as disk:
        assert disk.size == 256 << 20


@pytest.mark.parametrize(
    ("own", "theirs", "remedy"),
    [("loud-loud-loud", THEIRS[1], "authentication failed"), (OWN[1], "loud-loud-loud", "prove")],
)
async def test_a_wrong_secret(tmp_path: Path, own: str, theirs: str, remedy: str) -> None:
    configure("mutual")
    secrets = with_secrets(tmp_path, "mutual", own, theirs)
    with pytest.raises(AuthenticationError, match=remedy):
        async with one_disk("async", as_user(), secrets):
            pass


async def test_no_credentials() -> None:
    configure("one-way")
    with pytest.raises(LoginError):
        async with one_disk("async", os.environ["LAB_URL"]):
            pass

"""iSCSI names, and which one this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk import names as module
from iserblk.errors import BadArgument
from iserblk.names import MAXIMUM_NAME, check_name, initiator_name, may_name, random_isid

IQN = "iqn.2026-11.example:disk"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own: a folder for its two files."""
    monkeypatch.setattr(module, "NAME_FILE", tmp_path / "initiatorname.iscsi")
    monkeypatch.setattr(module, "MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(module, "SAID", set())
    return tmp_path


# shows: SYSTEM-52
def test_initiator_name_from_the_option(machine: Path) -> None:
    (machine / "initiatorname.iscsi").write_text("InitiatorName=iqn.1993-08.org.debian:01:a\n")
    assert initiator_name(IQN) == IQN


@pytest.mark.parametrize(
    "text",
    [
        "InitiatorName=iqn.1993-08.org.debian:01:a\n",
        "## comment\n#InitiatorName=iqn.1993-08.org.debian:01:b\n"
        "  InitiatorName = iqn.1993-08.org.debian:01:a  \nInitiatorAlias=x\n",
        "\ufeffInitiatorName=iqn.1993-08.org.debian:01:a\r\n",
        "# f\udcfcr den Rechner \udc85\nInitiatorName=iqn.1993-08.org.debian:01:a\n",  # no UTF-8
    ],
)
def test_initiator_name_from_the_file(machine: Path, text: str) -> None:
    name = machine / "initiatorname.iscsi"
    name.write_bytes(text.encode(errors="surrogateescape"))
    assert initiator_name("") == "iqn.1993-08.org.debian:01:a"


# shows: SYSTEM-52
def test_bad_initiator_name_in_the_file(machine: Path) -> None:
    (machine / "initiatorname.iscsi").write_text("InitiatorName=me\n")
    with pytest.raises(BadArgument, match=r"initiatorname\.iscsi.*'me' is no iSCSI name"):
        initiator_name("")


@pytest.mark.parametrize(
    "content",
    [
        *(b"GenerateName=yes\n", b"", b"InitiatorAlias=x\n", b"#InitiatorName=iqn.2026-11.a\n"),
        "InitiatorName=iqn.2026-11.example:a\n".encode("utf-16"),
    ],
)
def test_a_file_without_a_name_is_told_of(
    machine: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: a name is looked for at each login."""
    (machine / "initiatorname.iscsi").write_bytes(content)
    name = initiator_name("")
    assert initiator_name("") == name
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"{machine}/initiatorname.iscsi: it has no line InitiatorName=")
    assert name in said and "initiator-name=" in said


def test_a_file_that_cannot_be_read_is_told_of(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (machine / "initiatorname.iscsi").mkdir()
    assert initiator_name("").startswith("iqn.2026-11.io.github.iserblk:")
    (record,) = caplog.records
    assert "initiatorname.iscsi: Is a directory: " in record.getMessage()


def test_initiator_name_of_the_machine(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The name is stable, of this machine alone, and does not show the machine's ID."""
    names = set()
    for machine_id in ("0123456789abcdef0123456789abcdef", "f123456789abcdef0123456789abcdef"):
        (machine / "machine-id").write_text(f"{machine_id}\n")
        name = initiator_name("")
        assert name == initiator_name("")
        assert check_name(name, "name") == name
        assert name.startswith("iqn.2026-11.io.github.iserblk:")
        assert machine_id[:12] not in name
        names.add(name)
    (machine / "machine-id").unlink()
    names.add(initiator_name(""))  # of the host's name
    assert len(names) == 3
    assert caplog.records == []  # there is no such file


def test_isids_are_random() -> None:
    """And of the type that says so (RFC 7143 section 11.12.5)."""
    first, second = random_isid(), random_isid()
    assert first != second
    assert len(first) == 6 and first[0] == 0x80


@pytest.mark.parametrize("name", [IQN, "x", "\u00e9" * 111, "x" * MAXIMUM_NAME, "a b"])
def test_names_from_the_network(name: str) -> None:
    assert may_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "x" * 224, "\u00e9" * 112, "a\nb", "a\0", "\x7f", "\ud800", "\u0130" * 111, "\u202e"],
    ids=ascii,
)
def test_names_from_the_network_that_are_not_kept(name: str) -> None:
    """The limit is one of bytes; of \u0130 the lower case is longer."""
    assert not may_name(name)

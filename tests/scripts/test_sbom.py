"""Bills of materials (scripts/sbom.py): valid by the schema of CycloneDX, and of what is there."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import deb_environment
import pytest
import sbom
from cyclonedx.schema import SchemaVersion

from tests.scripts.test_deb import distribution

STATUS = """\
Package: iserblk
Status: install ok installed
Architecture: amd64
Version: 0.1.0+deb13

Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.41-12+deb13u1

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1:2~3
"""


def need_valid(made: dict[str, Any]) -> None:
    # Its import takes two seconds; each process that runs any tests imports this module.
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415

    fault = JsonStrictValidator(SchemaVersion.from_version(sbom.SPEC)).validate_str(sbom.text(made))
    assert fault is None, fault
    refs = [part["bom-ref"] for part in made["components"]]
    assert len(set(refs)) == len(refs)


def test_the_validator_finds_faults() -> None:
    made = sbom.document(sbom.ourselves("1"), [sbom.component("a", "1")])
    need_valid(made)
    made["components"][0]["hashes"] = [{"alg": "SHA-256", "content": "short"}]
    with pytest.raises(AssertionError, match="short"):
        need_valid(made)


@pytest.fixture
def bundled(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The bill of an environment, and the place of its packages."""
    place, archives = tmp_path / "site-packages", tmp_path / "archives"
    archives.mkdir()
    (archives / "a_b-1.9-py3-none-any.whl").write_bytes(b"a")
    (archives / "c-2.tar.gz").write_bytes(b"c")
    parts = [
        distribution(place, "iserblk", "a.b>=1", 'c>=2; extra == "fuse"', "of-the-system"),
        distribution(place, "a.b", "c", version="1.9"),
        distribution(place, "c", 'd; extra == "x"', version="2"),
    ]
    return deb_environment.bill(parts, archives), place


def test_what_is_bundled(bundled: tuple[dict[str, Any], Path]) -> None:
    made, place = bundled
    need_valid(made)
    found = {part["purl"]: part["hashes"][0]["content"] for part in made["components"]}
    assert found == {
        "pkg:pypi/a-b@1.9": hashlib.sha256(b"a").hexdigest(),
        "pkg:pypi/c@2": hashlib.sha256(b"c").hexdigest(),
    }
    needs = {each["ref"]: each["dependsOn"] for each in made["dependencies"]}
    assert needs == {
        "pkg:generic/iserblk@1": ["pkg:pypi/a-b@1.9", "pkg:pypi/c@2"],
        "pkg:pypi/a-b@1.9": ["pkg:pypi/c@2"],
        "pkg:pypi/c@2": [],
    }
    assert sbom.differences(made, place) == []


def test_what_is_compiled_in(tmp_path: Path) -> None:
    """It has no file of its own among those that are installed."""
    place, archives = tmp_path / "site-packages", tmp_path / "archives"
    archives.mkdir()
    pins = deb_environment.PINS / "build.txt"
    tools = {name: deb_environment.version_of(pins, name.lower()) for name in ("mypy", "Cython")}
    made = deb_environment.bill([distribution(place, "iserblk")], archives, tools)
    need_valid(made)
    refs = [f"pkg:pypi/{name.lower()}@{version}" for name, version in sorted(tools.items())]
    assert [part["purl"] for part in made["components"]] == refs
    assert all(version[0].isdigit() for version in tools.values())
    assert made["dependencies"] == [{"ref": "pkg:generic/iserblk@1", "dependsOn": refs}]
    assert sbom.differences(made, place) == []


def test_a_bill_has_all_that_is_there_and_no_more(bundled: tuple[dict[str, Any], Path]) -> None:
    made, place = bundled
    distribution(place, "e", version="5")
    made["components"][0]["version"] = "1.8"
    assert sbom.differences(made, place) == [
        "not in the bill: a-b 1.9", "not in the bill: e 5", "not there: a-b 1.8",
    ]  # fmt: skip


def test_what_was_not_taken_from_the_index_has_no_place_in_it(tmp_path: Path) -> None:
    (tmp_path / "archives").mkdir()
    parts = [distribution(tmp_path, "iserblk"), distribution(tmp_path, "a")]
    with pytest.raises(SystemExit, match="a 1 was not taken from"):
        deb_environment.bill(parts, tmp_path / "archives")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ("License-Expression: MIT OR Apache-2.0", {"expression": "MIT OR Apache-2.0"}),
        ("License: LGPL", {"license": {"name": "LGPL"}}),
        (
            "Classifier: License :: OSI Approved :: MIT License",
            {"license": {"name": "MIT License"}},
        ),
        ("Summary: none", None),
    ],
)
def test_licences(tmp_path: Path, fields: str, wanted: object) -> None:
    info = tmp_path / "a-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: a\nVersion: 1\n{fields}\n")
    metadata = PathDistribution(info).metadata
    assert sbom.licence(metadata) == wanted
    need_valid(sbom.document(sbom.ourselves("1"), [sbom.of_python(metadata, "0" * 64)]))


def test_the_same_things_make_the_same_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    parts = [sbom.component("a", "1"), sbom.component("b", "1")]
    first = sbom.document(sbom.ourselves("1"), parts)
    assert first["metadata"]["timestamp"] == "2027-01-15T08:00:00Z"
    assert sbom.text(first) == sbom.text(sbom.document(sbom.ourselves("1"), parts[::-1]))
    other = sbom.document(sbom.ourselves("1"), parts[:1])
    assert other["serialNumber"] != first["serialNumber"]


def test_of_a_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "iserblk-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("iserblk/_crc.so", "ours")
        archive.writestr("iserblk__mypyc.cpython-311-x86_64-linux-gnu.so", "ours")
        archive.writestr("iserblk/sockets/_syscalls.cpython-311-x86_64-linux-gnu.so", "ours")
        archive.writestr("iserblk.libs/libisal-0123abcd.so.2.0.30", "theirs")
    sbom.main(["wheel", str(wheel), "--libisal", "2.30.0"])
    made = json.loads(capsys.readouterr().out)
    need_valid(made)
    part, *tools = made["components"]
    assert [each["purl"] for each in tools] == ["pkg:pypi/cython", "pkg:pypi/mypy"]
    assert part["purl"] == "pkg:generic/isa-l@2.30.0"
    assert part["hashes"][0]["content"] == hashlib.sha256(b"theirs").hexdigest()
    assert made["metadata"]["component"]["version"] == "0.1.0"


def root(tmp_path: Path, **files: str) -> Path:
    made = tmp_path / "root.tar"
    with tarfile.open(made, "w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return made


def test_of_an_image(
    tmp_path: Path, bundled: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "./var/lib/dpkg/status": STATUS,
        "./usr/lib/os-release": "ID=debian\nVERSION_CODENAME=trixie\n",
        f"./{sbom.PLACE}": sbom.text(bundled[0]),
    }
    sbom.main(["image", str(root(tmp_path, **files))])
    made = json.loads(capsys.readouterr().out)
    need_valid(made)
    assert [part["purl"] for part in made["components"]] == [
        "pkg:deb/debian/iserblk@0.1.0%2Bdeb13?arch=amd64&distro=trixie",
        "pkg:deb/debian/libc6@2.41-12%2Bdeb13u1?arch=amd64&distro=trixie",
        "pkg:pypi/a-b@1.9", "pkg:pypi/c@2",
    ]  # fmt: skip
    assert made["metadata"]["component"]["version"] == "0.1.0+deb13"


def test_an_image_without_our_package(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no usr/share/iserblk/sbom\.cdx\.json"):
        sbom.of_image(root(tmp_path, **{"./var/lib/dpkg/status": STATUS}))

"""Bills of materials: what is in a package, a wheel or an image of ours, as CycloneDX 1.6 (JSON).

    scripts/sbom.py wheel FILE.whl [--libisal VERSION]
    scripts/sbom.py image ROOT.tar

Prints the document. ``wheel``: libraries that auditwheel has put in, and what is compiled in.
``image``: the Debian packages of its root, and what the bill of iserblk's own package in there
lists. scripts/deb_environment.py
makes the bill of the package itself. With SOURCE_DATE_EPOCH set, the same things make the same
document. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tarfile
import time
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

SPEC = "1.6"
PLACE = "usr/share/iserblk/sbom.cdx.json"  # in the package
_STATUS = "var/lib/dpkg/status"
_RELEASE = "usr/lib/os-release"
_TOOLS = {"mypy": "MIT", "Cython": "Apache-2.0"}
_LIBISAL = re.compile(r"[^/]+\.libs/libisal-[^/]+")
# No part of a document: what it says is the same without.
_NAMESPACE = uuid.UUID("6f1b0f0e-6a0c-5c58-9d5e-5c3c1c9f3a4e")


def component(
    name: str,
    version: str,
    *,
    kind: str = "library",
    purl: str = "",
    sha256: str = "",
    licence: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One component. ``version``: "": not known. ``sha256``: of the file it was taken from;
    ``licence``: by ``licence``."""
    made: dict[str, Any] = {"type": kind, "name": name}
    if version:
        made["version"] = version
    made["bom-ref"] = purl or f"{name}@{version}"
    if purl:
        made["purl"] = purl
    if sha256:
        made["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    if licence:
        made["licenses"] = [licence]
    return made


class Metadata(Protocol):
    """That of a package of Python."""

    def __getitem__(self, key: str, /) -> str: ...

    def get_all(self, name: str, /) -> list[Any] | None: ...


def licence(metadata: Metadata) -> dict[str, Any] | None:
    """That of a package of Python: an expression of SPDX where the metadata has one, otherwise its
    own words."""
    for text in metadata.get_all("License-Expression") or []:
        return {"expression": text}
    for text in metadata.get_all("License") or []:
        if text and "\n" not in text:
            return {"license": {"name": text}}
    names = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    return {"license": {"name": ", ".join(names)}} if names else None


def of_python(metadata: Metadata, sha256: str) -> dict[str, Any]:
    """A package of the Python package index."""
    name, version = _canonical(metadata["Name"]), metadata["Version"]
    return component(
        metadata["Name"], version, purl=f"pkg:pypi/{name}@{quote(version)}", sha256=sha256,
        licence=licence(metadata),
    )  # fmt: skip


def compiled_in(versions: Mapping[str, str]) -> list[dict[str, Any]]:
    """What compiled modules have in them of the tools that have written their C files: mypyc's
    runtime, which is in the package mypy, and Cython's. ``versions``: of mypy and Cython; "": not
    known."""
    made = []
    for name, version in versions.items():
        purl = f"pkg:pypi/{_canonical(name)}" + (f"@{quote(version)}" if version else "")
        made.append(component(name, version, purl=purl, licence={"expression": _TOOLS[name]}))
    return made


def ourselves(version: str, kind: str = "application") -> dict[str, Any]:
    return component(
        "iserblk", version, kind=kind, purl=f"pkg:generic/iserblk@{quote(version)}",
        licence={"expression": "Apache-2.0"},
    )  # fmt: skip


def document(
    about: dict[str, Any],
    components: Iterable[dict[str, Any]],
    needs: Mapping[str, Iterable[str]] | None = None,
) -> dict[str, Any]:
    """A bill of materials. ``about``: what has the components in it; ``needs``: reference → the
    references that it needs."""
    parts = sorted(components, key=lambda part: str(part["bom-ref"]))
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    made: dict[str, Any] = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)),
            "component": about,
        },
        "components": parts,
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(set(those))}
            for ref, those in sorted((needs or {}).items())
        ],
    }
    made["serialNumber"] = uuid.uuid5(_NAMESPACE, json.dumps(made, sort_keys=True)).urn
    return made


def text(made: dict[str, Any]) -> str:
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def differences(made: Mapping[str, Any], place: Path) -> list[str]:
    """Where a package's bill is not what is installed in ``place`` (site-packages). iserblk is what
    the bill is about, and no component of it; what is compiled in has no file there, nor a hash."""
    listed = {
        (_canonical(part["name"]), part["version"])
        for part in made["components"]
        if "hashes" in part
    }
    listed.add(("iserblk", made["metadata"]["component"]["version"]))
    there = set()
    for info in place.glob("*.dist-info"):
        metadata = Parser().parsestr((info / "METADATA").read_text("utf-8"))
        there.add((_canonical(metadata["Name"]), metadata["Version"]))
    return [
        *(f"not in the bill: {name} {version}" for name, version in sorted(there - listed)),
        *(f"not there: {name} {version}" for name, version in sorted(listed - there)),
    ]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- what was built -------------------------------------------------------------------------------


def of_wheel(wheel: Path, libisal: str) -> dict[str, Any]:
    """``libisal``: the version of the library that the wheel was compiled with."""
    with zipfile.ZipFile(wheel) as archive:
        parts = [
            component(
                "isa-l", libisal, purl=f"pkg:generic/isa-l@{quote(libisal)}",
                sha256=hashlib.sha256(archive.read(name)).hexdigest(),
                licence={"expression": "BSD-3-Clause"},
            )
            for name in archive.namelist()
            if _LIBISAL.fullmatch(name)
        ]  # fmt: skip
        parts += compiled_in(
            {
                tool: ""
                for tool, place in (("mypy", "iserblk__mypyc."), ("Cython", "iserblk/sockets/_sys"))
                if any(name.startswith(place) for name in archive.namelist())
            }
        )
    about = ourselves(wheel.name.split("-")[1], "library")
    about["hashes"] = [
        {"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    ]
    return document(about, parts)


def of_image(root: Path) -> dict[str, Any]:
    """``root``: the file systems' archive. Raises SystemExit: it has no list of packages, or
    iserblk's package is not in it."""
    found: dict[str, bytes] = {}
    with tarfile.open(root) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if name in (_STATUS, _RELEASE, PLACE):
                file = archive.extractfile(member)
                found[name] = file.read() if file else b""
    if missing := {_STATUS, PLACE} - set(found):
        raise SystemExit(f"sbom: {root} has no {', '.join(sorted(missing))}")
    codename = re.search(r"^VERSION_CODENAME=(\w+)", found.get(_RELEASE, b"").decode(), re.M)
    distribution = f"&distro={codename[1]}" if codename else ""
    parts = list(json.loads(found[PLACE])["components"])
    version = ""
    for paragraph in found[_STATUS].decode().split("\n\n"):
        fields = Parser().parsestr(paragraph)
        if not (fields["Status"] or "").endswith(" installed"):
            continue
        name = fields["Package"]
        if name == "iserblk":
            version = fields["Version"]
        words = f"arch={fields['Architecture']}{distribution}"
        purl = f"pkg:deb/debian/{quote(name)}@{quote(fields['Version'])}?{words}"
        parts.append(component(name, fields["Version"], purl=purl))
    return document(ourselves(version, "container"), parts)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("wheel", "image"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--libisal", metavar="VERSION", default="unknown")
    given = parser.parse_args(arguments)
    if given.kind == "wheel":
        print(text(of_wheel(given.file, given.libisal)), end="")
    else:
        print(text(of_image(given.file)), end="")


if __name__ == "__main__":
    main(sys.argv[1:])

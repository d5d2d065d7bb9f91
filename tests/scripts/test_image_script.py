"""scripts/image, with programs of ours in place of those that build; what they build is tested in
tests/packaging/test_image.py. And the first process of a container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import sbom

from iserblk import __version__
from tests.support.podman import USER
from tests.support.target import ROOT

# Each notes its arguments. mmdebstrap also keeps the list of sources that it was given, and the
# package of ours that is in one of them.
MMDEBSTRAP = """#!/bin/sh
echo "mmdebstrap $*" >>"$CALLS"
[ -z "$BROKEN" ] || { echo "E: made to fail" >&2; exit 25; }
for word; do before=$target target=$sources sources=$word; done
cp "$sources" "$CALLS.sources"
cp "$(sed -n 's/.*copy:\\(.*\\) .*/\\1/p' "$sources")/Packages" "$CALLS.packages"
tar --create --file "$target" --directory "$ROOT" .
"""
BUILDAH = """#!/bin/sh
echo "buildah $*" >>"$CALLS"
case $* in
  *" from "*) echo working-container ;;
  *" commit "*)
    for word; do last=$word; done
    path=${last#oci-archive:}
    echo image >"${path%%:*}" ;;
esac
"""
PODMAN = """#!/bin/sh
echo "podman $*" >>"$CALLS"
"""
TINI = """#!/bin/sh
for word; do printf '%s\\n' "$word"; done
"""
STATUS = """\
Package: iserblk
Status: install ok installed
Architecture: amd64
Version: 0.1.0+deb13
"""
OURS, THEIRS = sbom.ourselves("0.1.0"), sbom.component("trio", "0.30", purl="pkg:pypi/trio@0.30")


class Image:
    """Runs scripts/image. ``calls``: what it ran, a line each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.scratch = directory / "scratch"
        self.scratch.mkdir()
        programs = directory / "programs"
        programs.mkdir()
        for name, text in (("mmdebstrap", MMDEBSTRAP), ("buildah", BUILDAH), ("podman", PODMAN)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self._calls = directory / "calls"
        root = directory / "root"
        for name, text in (
            ("var/lib/dpkg/status", STATUS), (sbom.PLACE, sbom.text(sbom.document(OURS, [THEIRS]))),
        ):  # fmt: skip
            (root / name).parent.mkdir(parents=True)
            (root / name).write_text(text)
        self._environment = {
            "ROOT": str(root),
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(self._calls),
            "TMPDIR": str(self.scratch),
            "BROKEN": "",
        }

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    def kept(self, what: str) -> str:
        return Path(f"{self._calls}.{what}").read_text()

    def run(self, *words: object, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROOT / "scripts" / "image"), *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            env={**self._environment, **changes},
        )


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def package(directory: Path, name: str = "iserblk", architecture: str = "all") -> Path:
    """A package with nothing in it."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("not installed: dpkg-deb")
    control = directory / "package" / "DEBIAN" / "control"
    control.parent.mkdir(parents=True)
    control.write_text(
        f"Package: {name}\nVersion: 0.1.0+deb13\nArchitecture: {architecture}\n"
        "Maintainer: nobody <nobody@example.org>\nDescription: for a test\n"
    )
    made = directory / "some package.deb"
    subprocess.run(
        ["dpkg-deb", "--build", str(directory / "package"), str(made)],
        check=True,
        capture_output=True,
    )
    return made


def test_what_it_builds(image: Image, tmp_path: Path) -> None:
    done = image.run("--output", tmp_path / "dist", "--package", package(tmp_path), "--load")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    bill, archive = sorted((tmp_path / "dist").iterdir())
    assert bill.name == archive.name.removesuffix(".oci.tar") + ".cdx.json"
    purls = [part["purl"] for part in json.loads(bill.read_text())["components"]]
    assert purls == ["pkg:deb/debian/iserblk@0.1.0%2Bdeb13?arch=amd64", "pkg:pypi/trio@0.30"]
    name = "localhost/iserblk:0.1.0"
    assert archive.name.startswith("iserblk-0.1.0-") and archive.name.endswith(".oci.tar")
    assert f"built {archive}: {name}," in done.stderr
    calls = "\n".join(image.calls)
    assert " trixie " in calls and " --include=iserblk " in calls
    assert "deb http://deb.debian.org/debian-security trixie-security main" in image.kept("sources")
    assert "Package: iserblk" in image.kept("packages")
    (config,) = (line for line in image.calls if " config " in line)
    for words in (
        '--entrypoint ["/usr/local/bin/iserblk-entry"]',
        f"--user {USER}:{USER} ",
        "--stop-signal SIGTERM",
        "org.opencontainers.image.version=0.1.0+deb13",
    ):
        assert words in config
    assert image.calls[-2:] == [
        f"podman load --input {archive}",
        f"podman tag {name} localhost/iserblk:latest",
    ]
    assert list(image.scratch.iterdir()) == []


@pytest.mark.parametrize("user", ["", "somebody@", "runner:t0p%40secret@", "runner:t0p@secret@"])
def test_no_secret_of_the_checkout_gets_into_a_label(
    image: Image, tmp_path: Path, user: str
) -> None:
    git = tmp_path / "programs" / "git"
    git.write_text(
        f"#!/bin/sh\ncase $* in *' get-url origin') echo 'https://{user}git.example/a/b@1.git' ;;\n"
        f'*) exec {shutil.which("git")} "$@" ;; esac\n'
    )
    git.chmod(0o755)
    done = image.run("--output", tmp_path / "dist", "--package", package(tmp_path))
    assert done.returncode == 0, done.stderr
    (config,) = (line for line in image.calls if " config " in line)
    assert "image.source=https://git.example/a/b@1 " in config


def test_names_releases_and_mirrors(image: Image, tmp_path: Path) -> None:
    words = ("--release", "12", "--name", "registry.example:5000/storage/iserblk")
    mirror = ("--mirror", "http://mirror.example/debian/")
    done = image.run("--output", tmp_path / "dist", "--package", package(tmp_path), *words, *mirror)
    assert done.returncode == 0, done.stderr
    assert "registry.example:5000/storage/iserblk:0.1.0," in done.stderr
    sources = image.kept("sources")
    assert "deb http://mirror.example/debian bookworm main" in sources
    assert "deb http://mirror.example/debian-security bookworm-security main" in sources
    assert not any(line.startswith("podman") for line in image.calls)


def test_where_it_fails(image: Image, tmp_path: Path) -> None:
    output = tmp_path / "dist"
    done = image.run("--output", output, "--package", package(tmp_path), BROKEN="yes")
    assert done.returncode == 1 and "E: made to fail" in done.stderr
    assert list(output.iterdir()) == [] and list(image.scratch.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("--frobnicate",),
        ("--output",),
        ("--output", ""),
        ("--release", "sid"),
        ("--mirror", "mirror.example"),
        ("--name", "Upper Case"),
        ("--package", "/nowhere/iserblk.deb"),
    ],
)
def test_bad_arguments(image: Image, tmp_path: Path, words: tuple[str, ...]) -> None:
    output = () if "--output" in words else ("--output", tmp_path / "dist")
    done = image.run(*output, *words)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.splitlines()[-1].startswith("image: ")
    assert list(image.scratch.iterdir()) == []


@pytest.mark.parametrize(("name", "architecture"), [("other", "all"), ("iserblk", "pdp11")])
def test_a_package_that_is_another(
    image: Image, tmp_path: Path, name: str, architecture: str
) -> None:
    made = package(tmp_path, name, architecture)
    done = image.run("--output", tmp_path / "dist", "--package", made)
    assert done.returncode == 7 and str(made) in done.stderr


def test_programs_that_are_missing(image: Image, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "env", "readlink", "dirname", "git"):
        found = shutil.which(name)
        assert found is not None
        (bare / name).symlink_to(found)
    done = image.run("--output", tmp_path / "dist", PATH=str(bare))
    assert done.returncode == 1
    assert "missing: buildah mmdebstrap" in done.stderr


SERVER = ["-s", "-e", "130", "-e", "143", "--", "iserblk"]
OTHER = ["-s", "--", "iserblk"]


@pytest.mark.parametrize(
    ("words", "before"),
    [
        (["nbd", "iser://a/b", "--socket", "/a b"], SERVER),
        (["-v", "target", "--config", "c"], SERVER),
        (["copy", "nbd", "target"], OTHER),
        (["csi"], OTHER),
        (["--help"], OTHER),
        ([], OTHER),
    ],
)
def test_the_first_process_of_a_container(
    tmp_path: Path, words: list[str], before: list[str]
) -> None:
    """tini makes 0 of what servers end with after a signal, and of nothing else."""
    (tmp_path / "tini").write_text(TINI)
    (tmp_path / "tini").chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts" / "image_entry"), *words],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert done.stdout.splitlines() == [*before, *words]


def test_the_manifest_of_kubernetes_names_it() -> None:
    manifest = (ROOT / "docs" / "kubernetes" / "iserblk.yaml").read_text()
    assert f"image: localhost/iserblk:{__version__}\n" in manifest
    assert "runAsUser: 0 " in manifest  # the image has another user

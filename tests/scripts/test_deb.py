"""The Debian package: what debian/ says agrees with the rest of the tree; what scripts/deb does.

The package itself is built, installed and used by scripts/deb and in bare roots, not here."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import deb_environment
import pytest
from deb_environment import canonical, copy, dependencies, parse, used
from floors import floors
from release_check import MANUALS

import iserblk
from tests.cli.commands import environment
from tests.support.nbdkit import need
from tests.support.target import ROOT, running_target

DEBIAN = ROOT / "debian"
# The figures of systemd-analyze, of 100: at most. 96 is a service without any hardening.
EXPOSURE = {
    "iserblk-attach@.service": 40,
    "iserblk-mount@.service": 42,
    "iserblk-nbd@.service": 14,
    "iserblk-target@.service": 16,
    "iserblk-exporter.service": 20,
}
OF_THE_USER = {"iserblk-nbd@.service", "iserblk-target@.service"}


def lists(name: str) -> list[list[str]]:
    return [line.split() for line in (DEBIAN / name).read_text().splitlines() if line.strip()]


def field(name: str) -> str:
    match = re.search(rf"^{name}:((?:.*\n)(?:\s+.*\n)*)", (DEBIAN / "control").read_text(), re.M)
    assert match is not None
    return match[1]


# --- debian/ agrees with the tree -----------------------------------------------------------------


def test_the_version_is_that_of_the_program() -> None:
    first = (DEBIAN / "changelog").read_text().partition("\n")[0]
    assert first == f"iserblk ({iserblk.__version__}) unstable; urgency=medium"


def test_pip_may_take_every_dependency_from_the_distribution() -> None:
    """It can only where the distribution's package is there when the package is built."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project["build-system"]["requires"] = []
    del project["project"]["optional-dependencies"]["csi"]  # used if it is there
    wanted = {f"python3-{canonical(name)}" for name in floors(project)}
    assert wanted <= set(re.findall(r"python3-[a-z0-9-]+", field("Build-Depends")))
    assert {"python3-grpcio", "python3-protobuf"} <= set(
        re.findall(r"python3-[a-z0-9-]+", field("Suggests"))
    )


def test_programs_and_manuals_are_installed() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {path.name for path in (DEBIAN / "bin").iterdir()} == set(scripts)
    installed = lists("iserblk.install")
    for name, entry in scripts.items():
        package = entry.partition(":")[0].removesuffix(".__main__")
        assert f' -P -m {package} "$@"\n' in (DEBIAN / "bin" / name).read_text()
        (place,) = [there for path, there in installed if path == f"debian/bin/{name}"]
        assert place in ("usr/bin", "usr/sbin")
    made = [path for path, _ in installed if path.startswith("debian/made/share/")]
    for manual in MANUALS:
        path = f"debian/made/share/{manual}"
        assert any(path == each or path.startswith(f"{each}/") for each in made), manual


def test_what_is_to_be_installed_is_there(units: Path) -> None:
    """Or is made by debian/rules."""
    rules = (DEBIAN / "rules").read_text()
    names = [words[0] for words in lists("iserblk.install")]
    names += [words[0] for name in ("docs", "examples") for words in lists(f"iserblk.{name}")]
    for name in names:
        if name.startswith("debian/made/systemd/"):
            assert fnmatch.filter([path.name for path in units.iterdir()], Path(name).name)
        elif name.startswith("debian/made/"):
            assert "$(MADE)" in rules
        else:
            assert list(ROOT.glob(name)), name


def test_the_directory_and_the_units_are_of_the_user_that_is_made(units: Path) -> None:
    ((kind, user, *_),) = lists("iserblk.sysusers")
    assert (kind, user) == ("u", "iserblk")
    (words,) = [each for each in lists("iserblk.tmpfiles") if each[0] != "#"]
    assert words == ["d", "/var/lib/iserblk", "0700", user, user, "-"]
    for unit in units.glob("*.service"):
        found = re.findall("^User=(.*)$", unit.read_text(), re.M)
        assert found == ([user] if unit.name in OF_THE_USER else [])


def test_maintainer_scripts_are_of_sh() -> None:
    for name in ("postinst", "prerm", "postrm"):
        path = DEBIAN / f"iserblk.{name}"
        subprocess.run(["sh", "-n", path], check=True)
        assert "#DEBHELPER#" in path.read_text()


class Machine:
    """What the maintainer scripts find, below ``folder``. ``asked``: the commands of iserblk."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._calls = folder, folder / "calls"
        self.run, self.mountinfo = folder / "run", folder / "mountinfo"
        self.swaps, self.block = folder / "swaps", folder / "block"
        self.user = "false"  # the command that says whether there is the user iserblk
        self.bytecode = folder / "lib" / "__pycache__"
        self.bytecode.mkdir(parents=True)
        self.mountinfo.touch()
        self.swaps.touch()
        self._calls.touch()
        program = folder / "iserblk"
        program.write_text(
            f"#!/bin/sh\nprintf '%s|' \"$@\" >>{self._calls}\n"
            'case $* in *busy*) echo "$*: in use" >&2; exit 28 ;; esac\n'
        )
        program.chmod(0o755)

    def script(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        text = (DEBIAN / f"iserblk.{name}").read_text()
        for place, here in (
            ("/run/iserblk", self.run), ("/proc/self/mountinfo", self.mountinfo),
            ("/run/systemd/system", self._folder / "none"), ("/etc/", f"{self._folder}/etc/"),
            ("/usr/lib/iserblk", self.bytecode.parent), ("/var/lib", self._folder / "var"),
            ("/sys/block", self.block), ("/proc/swaps", self.swaps),
            ("getent passwd iserblk", self.user),
        ):  # fmt: skip
            text = text.replace(place, str(here))
        return subprocess.run(
            ["sh", "-c", text, name, *words], cwd=self._folder,
            capture_output=True, text=True, check=False,
            env={"PATH": f"{self._folder}:{os.environ['PATH']}"},
        )  # fmt: skip

    @property
    def asked(self) -> str:
        return self._calls.read_text()


def mounted(place: str) -> str:
    return f"43 27 0:39 / {place} rw,nosuid shared:1 - fuse.iserblk iser://h/iqn.a:b rw,user_id=0\n"


def test_a_removal_detaches_and_unmounts(tmp_path: Path) -> None:
    """Whatever the places are called: as the kernel writes them."""
    machine = Machine(tmp_path)
    for name in ("nbd0", "nbd11"):
        (machine.run / name).mkdir(parents=True)
        (machine.run / name / "state.json").touch()
    (machine.run / "nbd2").mkdir()  # of an attach that has failed
    places = [r"/mnt/a\0401", r"/mnt/b\134n\043", "/run/*", "/mnt/c"]
    other = "44 27 0:40 / /mnt/d rw - fuse.sshfs host:/fuse.iserblk rw\n"
    machine.mountinfo.write_text("".join(map(mounted, places)) + other)
    done = machine.script("prerm", "remove")
    assert (done.returncode, done.stderr) == (0, "")
    unmounted = "".join(
        f"umount|{each}|" for each in ("/mnt/a 1", "/mnt/b\\n#", "/run/*", "/mnt/c")
    )
    assert machine.asked == f"detach|/dev/nbd0|detach|/dev/nbd11|{unmounted}"
    assert not machine.bytecode.exists()


def test_a_removal_is_refused_where_something_is_in_use(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mountinfo.write_text(mounted("/mnt/busy") + mounted("/mnt/idle"))
    done = machine.script("prerm", "remove")
    assert done.returncode == 1
    assert machine.asked == "umount|/mnt/busy|umount|/mnt/idle|"
    first, last = done.stderr.splitlines()
    assert first == "umount /mnt/busy: in use" and "is not removed" in last
    assert machine.bytecode.exists()


@pytest.mark.parametrize("source", ["/dev/nbd1", "/dev/nbd1p2"])
def test_a_removal_does_not_try_to_detach_what_is_mounted(source: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in ("nbd1", "nbd10"):
        (machine.run / name).mkdir(parents=True)
        (machine.run / name / "state.json").touch()
    machine.mountinfo.write_text(f"45 27 43:0 / /data rw,noatime shared:2 - xfs {source} rw\n")
    done = machine.script("prerm", "remove")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "/dev/nbd1: mounted"
    assert machine.asked == "detach|/dev/nbd10|"


@pytest.mark.parametrize(
    ("holders", "swap", "words"),
    [
        ("nbd1/holders/dm-3", "", "in use by dm-3"),
        ("nbd1/nbd1p2/holders/md0", "", "in use by md0"),
        ("", "/dev/nbd1p2                             partition\t8 0 -2\n", "swap"),
    ],
)
def test_a_removal_does_not_try_to_detach_what_is_below_something_else(
    holders: str, swap: str, words: str, tmp_path: Path
) -> None:
    """What lies on LVM or the like is not mounted by the device's own name."""
    machine = Machine(tmp_path)
    for name in ("nbd1", "nbd10"):
        (machine.run / name).mkdir(parents=True)
        (machine.run / name / "state.json").touch()
        (machine.block / name / "holders").mkdir(parents=True)
    if holders:
        (machine.block / holders).mkdir(parents=True)
    machine.swaps.write_text(f"Filename Type Size Used Priority\n{swap}")
    done = machine.script("prerm", "remove")
    assert done.returncode == 1
    assert done.stderr.startswith(f"/dev/nbd1: {words}")
    assert machine.asked == "detach|/dev/nbd10|"


@pytest.mark.parametrize("status", [0, 8])
def test_a_purge_does_not_fail_for_a_process_of_its_user(status: int, tmp_path: Path) -> None:
    """userdel(8) refuses then, with status 8."""
    machine = Machine(tmp_path)
    machine.user = "true"
    program = tmp_path / "userdel"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/deleted\nexit {status}\n')
    program.chmod(0o755)
    done = machine.script("postrm", "purge")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "deleted").read_text() == "iserblk\n"
    assert ("`userdel iserblk` when its processes have ended" in done.stdout) == bool(status)


def test_a_removal_takes_no_volume_from_a_pod(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in ("nbd0/state.json", "csi/0123.lock", "csi/0123.json"):
        (machine.run / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.run / name).touch()
    done = machine.script("prerm", "remove")
    assert done.returncode == 1 and "pods have volumes" in done.stderr
    assert machine.asked == ""
    (machine.run / "csi/0123.json").unlink()
    assert machine.script("prerm", "remove").returncode == 0
    assert machine.asked == "detach|/dev/nbd0|"


def test_an_upgrade_detaches_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (machine.run / "nbd0").mkdir(parents=True)
    (machine.run / "nbd0" / "state.json").touch()
    machine.mountinfo.write_text(mounted("/mnt/a"))
    assert machine.script("prerm", "upgrade", "1").returncode == 0
    assert machine.script("postrm", "upgrade", "1").returncode == 0
    assert machine.asked == ""
    assert (machine.run / "nbd0" / "state.json").exists()


def test_a_late_purge_leaves_the_state_of_what_runs(tmp_path: Path) -> None:
    """Of a wheel or of a checkout, which came after the package."""
    machine = Machine(tmp_path)
    machine.run.mkdir()
    assert machine.script("postrm", "remove").returncode == 0
    assert not machine.run.exists()
    (machine.run / "nbd0").mkdir(parents=True)
    (tmp_path / "etc" / "iserblk").mkdir(parents=True)
    assert machine.script("postrm", "purge").returncode == 0
    assert (machine.run / "nbd0").exists()
    assert not (tmp_path / "etc" / "iserblk").exists()


# --- what other people's tools read ---------------------------------------------------------------


def home() -> str:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    return str(urls["Homepage"])


def test_all_name_the_same_place() -> None:
    """Where the project is found: pyproject.toml, debian/control, upstream/metadata and watch."""
    assert field("Homepage").strip() == home()
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    told = (DEBIAN / "upstream" / "metadata").read_text().splitlines()
    told += (DEBIAN / "watch").read_text().splitlines()
    found = [word for line in told for word in line.split() if word.startswith("https:")]
    assert len(found) == 7
    for url in [*urls.values(), *found]:
        assert url.startswith(home())
    documents = [url.rpartition("/main/")[2] for url in urls.values() if "/main/" in url]
    assert documents and all((ROOT / name).exists() for name in documents)


def test_the_watch_file_finds_the_source_archive() -> None:
    """With uscan's own patterns for its names."""
    pattern = (DEBIAN / "watch").read_text().split()[-1]
    for name, meaning in (
        ("@PACKAGE@", field("Source").strip()), ("@ANY_VERSION@", r"[-_]?(\d[\-+\.:\~\da-zA-Z]*)"),
        ("@ARCHIVE_EXT@", r"(?i)(?:\.(?:tar\.xz|tar\.bz2|tar\.gz|tar\.zstd?|zip|tgz|tbz|txz))"),
    ):  # fmt: skip
        assert name in pattern
        pattern = pattern.replace(name, meaning.replace("(?i)", ""))
    found = re.fullmatch(pattern, f"{home()}/download/iserblk-{iserblk.__version__}.tar.gz")
    assert found is not None and found[1] == iserblk.__version__
    assert not re.fullmatch(pattern, f"/iserblk-{iserblk.__version__}-cp311-cp311-linux.whl")


def test_the_tests_of_the_package_are_declared() -> None:
    """Each with what it runs; scripts/deb --test has autopkgtest run them."""
    paragraphs = (DEBIAN / "tests" / "control").read_text().split("\n\n")
    declared = {}
    for paragraph in paragraphs:
        fields = dict(re.findall("^([A-Z][a-z]+): (.*)$", paragraph, re.M))
        declared[fields["Tests"]] = fields["Restrictions"].split(", ")
        assert "@" in fields["Depends"].split(", ")
    scripts = {path.name for path in (DEBIAN / "tests").iterdir() if os.access(path, os.X_OK)}
    assert scripts == set(declared)
    for name, restrictions in declared.items():
        text = (DEBIAN / "tests" / name).read_text()
        subprocess.run(["sh", "-n", DEBIAN / "tests" / name], check=True)
        assert ("exit 77" in text) == ("skippable" in restrictions)
        assert ("\nmount " in text) == ("needs-root" in restrictions)


# --- the units of the package ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units and rules as they are in the package."""
    place = tmp_path_factory.mktemp("made") / "systemd"
    subprocess.run([DEBIAN / "units", ROOT / "scripts" / "systemd", place], check=True)
    return place


def test_units_fit_the_package(units: Path) -> None:
    source = ROOT / "scripts" / "systemd"
    assert sorted(path.name for path in units.iterdir()) == sorted(
        path.name for path in source.iterdir()
    )
    for path in units.iterdir():
        text = path.read_text()
        assert "@ISERBLK@" not in text and "checkout" not in text and "install-units" not in text
        assert path.suffix == ".rules" or "\nExecStart=/usr/bin/iserblk " in text
        kept = [line for line in (source / path.name).read_text().splitlines() if "=" in line]
        for line in (each.replace("@ISERBLK@", "/usr/bin/iserblk") for each in kept):
            more = line.replace("InaccessiblePaths=", "InaccessiblePaths=-/home -/root ")
            assert line in text or line == "ProtectHome=read-only" or more in text, line


@pytest.mark.parametrize("name", EXPOSURE)
def test_units_are_hardened(name: str, units: Path) -> None:
    need("systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE[name]}",
         "--no-pager", units / name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        pytest.skip("requires systemd-analyze security --offline: systemd 250 or later")
    assert done.returncode == 0, done.stdout


# --- the plugin of nbdkit -------------------------------------------------------------------------


def test_nbdkit_finds_the_plugin_by_its_name(tmp_path: Path) -> None:
    """The library that the package has in nbdkit's directory runs the script."""
    need("nbdkit", "nbdinfo", "cc")
    if not Path("/usr/include/nbdkit-plugin.h").exists():
        pytest.skip("requires Debian's nbdkit-plugin-dev")
    said = subprocess.run(["nbdkit", "--dump-config"], capture_output=True, text=True, check=True)
    match = re.search("^plugindir=(.*)$", said.stdout, re.M)
    assert match is not None
    if not Path(match[1], "nbdkit-python-plugin.so").exists():
        pytest.skip("requires nbdkit-plugin-python")
    library = tmp_path / "nbdkit-iserblk-plugin.so"
    script = ROOT / "nbd_plugin" / "iserblk.py"
    subprocess.run(
        ["cc", "-Wall", "-Werror", "-fPIC", "-shared", f'-DPLUGINS="{match[1]}"',
         f'-DSCRIPT="{script}"', "-o", library, DEBIAN / "nbdkit-iserblk-plugin.c"],
        check=True,
    )  # fmt: skip
    env = environment(PATH=f"/usr/bin:{os.environ['PATH']}")
    done = subprocess.run(
        ["nbdkit", "-U", "-", library], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 1 and "uri" in done.stderr  # the script itself asks for it
    with running_target([f"{tmp_path}/lun:size=1M"], tmp_path / "log") as target:
        done = subprocess.run(
            ["nbdkit", "-U", "-", library, f"{target.url}/0", "io-timeout=20", "--run",
             "nbdinfo --size $uri"],
            capture_output=True, text=True, check=False, env=env,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{1 << 20}\n"), done.stderr


# --- scripts/deb_environment.py -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requirement", "parts"),
    [
        ("trio>=0.27", ("trio", "0.27", "")),
        ("Mypy_extensions (>=1.0)", ("mypy-extensions", "1.0", "")),
        ("sortedcontainers", ("sortedcontainers", "", "")),
        ("pygments<3.0.0,>=2.13.0", ("pygments", "2.13.0", "")),
        ('cffi>=1.14; os_name == "nt"', ("cffi", "1.14", 'os_name == "nt"')),
        ('pyfuse3>=3.4 ; extra == "fuse"', ("pyfuse3", "3.4", 'extra == "fuse"')),
        ("iserblk[fuse]~=1.0", ("iserblk", "", "")),
    ],
)
def test_requirements(requirement: str, parts: tuple[str, str, str]) -> None:
    assert parse(requirement) == parts


def test_no_requirement() -> None:
    with pytest.raises(ValueError, match="is no requirement"):
        parse("../elsewhere")


def distribution(place: Path, name: str, *requirements: str, version: str = "1") -> Distribution:
    info = place / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requirements]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    return PathDistribution(info)


def test_what_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over packages of packages; but what the distribution's own need is its matter."""
    ours, system = tmp_path / "ours", tmp_path / "system"
    there = {
        each.metadata["Name"]: each
        for each in (
            distribution(ours, "iserblk", "a>=1.9", 'f>=3; extra == "fuse"'),
            distribution(ours, "a", "b>=1.10", "c", 'x; extra == "tests"'),
            distribution(system, "b", "d"),
            distribution(ours, "c", "b>=1.9", "a"),
            distribution(system, "f"),
        )
    }
    monkeypatch.setattr("importlib.metadata.distribution", there.__getitem__)
    monkeypatch.setattr(deb_environment, "DISTRIBUTIONS", system)
    found = {each.metadata["Name"]: floor for each, floor in used("iserblk")}
    assert found == {"iserblk": "", "a": "1.9", "b": "1.10", "c": "", "f": "3"}
    bundled, others = deb_environment.sort(ours)
    assert [each.metadata["Name"] for each in bundled] == ["iserblk", "a", "c"]
    monkeypatch.setattr(
        deb_environment, "package_of", lambda each: f"python3-{each.metadata['Name']}"
    )
    assert dependencies(others)[-2:] == ["python3-b (>= 1.10)", "python3-f (>= 3)"]
    with pytest.raises(SystemExit, match=r"iserblk comes from .*ours, .* build in a bare root"):
        deb_environment.sort(tmp_path / "elsewhere")


def test_what_is_copied(tmp_path: Path) -> None:
    source = distribution(tmp_path / "source", "a")
    names = ["a/__init__.py", "a/_tests/test_a.py", "a/__pycache__/a.pyc", "../../../bin/a",
             "a-1.dist-info/METADATA", "a-1.dist-info/RECORD", "a-1.dist-info/direct_url.json",
             "a-1.dist-info/licenses/LICENSE"]  # fmt: skip
    for name in names:
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(name)
            path.chmod(0o777)
    record = tmp_path / "source" / "a-1.dist-info" / "RECORD"
    record.write_text("".join(f"{name},,\n" for name in names))
    copy(source, tmp_path / "target")
    copied = [path for path in (tmp_path / "target").rglob("*") if path.is_file()]
    assert sorted(path.relative_to(tmp_path / "target").as_posix() for path in copied) == sorted(
        ["a/__init__.py", "a-1.dist-info/METADATA", "a-1.dist-info/licenses/LICENSE"]
    )
    assert {path.stat().st_mode & 0o777 for path in copied} == {0o644}


# --- scripts/deb, with tools that only note what they are called for ------------------------------

BUILD = """#!/bin/sh
[ -z "$FAILS" ] || { echo "made to fail"; exit 2; }
[ -z "$PYTHONPATH$ISERBLK_PLAIN" ] || exit 3
version=$(sed -n '1s/.*(\\(.*\\)).*/\\1/p' debian/changelog)
cp debian/changelog "../iserblk_${version}_amd64.changes"
touch "../iserblk_${version}_amd64.deb" "../iserblk_${version}_amd64.buildinfo"
"""


class Builder:
    """A clone that has nothing but what the script looks at."""

    def __init__(self, folder: Path) -> None:
        self.top, self.bin, self.output = folder / "clone", folder / "bin", folder / "out"
        for name in ("scripts/deb", "debian/changelog", "debian/control", "iserblk/__init__.py"):
            (self.top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.top / name)
        self.bin.mkdir()
        self.program("dpkg-buildpackage", BUILD)
        self.program("dpkg-checkbuilddeps", "#!/bin/sh\n")
        self.program("lintian", "#!/bin/sh\nexit $LINTIAN\n")
        self.git("init", "--quiet")
        self.commit("2026-11-20T10:00:00Z")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def git(self, *words: str, **changes: str) -> None:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(
            ["git", "-C", self.top, *settings, *words],
            check=True, capture_output=True, env={**os.environ, **changes},
        )  # fmt: skip

    def commit(self, date: str) -> None:
        self.git("add", ".")
        self.git("commit", "--quiet", "--allow-empty", "-m", "x", GIT_COMMITTER_DATE=date)

    def run(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        return subprocess.run(
            [self.top / "scripts" / "deb", "--output", self.output, *words],
            capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": path, "LINTIAN": "0", "FAILS": "", "PYTHONPATH": "/x",
                 "TMPDIR": str(self.top.parent), **changes},
        )  # fmt: skip

    def version(self) -> str:
        """Builds; returns the version of what was built."""
        shutil.rmtree(self.output, ignore_errors=True)
        done = self.run()
        assert done.returncode == 0, done.stderr
        (package,) = self.output.glob("*.deb")
        assert f"built {package}" in done.stderr
        return package.name.split("_")[1]


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    need("dpkg", "git")
    if "ID=debian" not in Path("/etc/os-release").read_text().splitlines():
        pytest.skip("requires Debian: scripts/deb builds for the release that it runs on")
    return Builder(tmp_path)


def test_later_commits_make_later_versions(builder: Builder) -> None:
    """So that one build of main can be installed over another, and a release over all before it."""
    found = [builder.version()]
    builder.commit("2026-11-20T10:00:01Z")
    found.append(builder.version())
    builder.git("tag", f"v{iserblk.__version__}")
    found.append(builder.version())
    builder.commit("2026-11-20T10:00:02Z")
    found.append(builder.version())
    found.append(f"{iserblk.__version__}.1~git2026+deb12")
    for before, after in itertools.pairwise(found):
        subprocess.run(["dpkg", "--compare-versions", before, "lt", after], check=True)
    assert re.fullmatch(re.escape(iserblk.__version__) + r"\+deb[0-9]+", found[2])
    assert "~git20261120100000." in found[0]


def test_the_newest_entry_becomes_that_of_the_build(builder: Builder) -> None:
    version = builder.version()
    (changes,) = builder.output.glob("*.changes")
    lines = (DEBIAN / "changelog").read_text().splitlines()
    found = changes.read_text().splitlines()
    assert found[0].startswith(f"iserblk ({version}) ") and found[2].startswith("  * Built from ")
    assert found[3] == lines[2]
    signed = [line for line in found if line.startswith(" -- ")]
    assert signed[0].endswith("  Fri, 20 Nov 2026 10:00:00 +0000")
    assert field("Maintainer").strip() in signed[0]
    assert signed[1:] == [line for line in lines if line.startswith(" -- ")][1:]


def test_faults_of_a_build(builder: Builder) -> None:
    done = builder.run(FAILS="yes")
    assert done.returncode == 1
    assert "made to fail" in done.stderr and "dpkg-buildpackage failed" in done.stderr
    done = builder.run(LINTIAN="2")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "deb: lintian has found faults"
    assert list(builder.output.glob("*.deb"))  # to look at
    assert not list(builder.top.parent.glob("iserblk-deb.*"))  # nothing is left


@pytest.mark.parametrize(("ends", "status"), [(0, 0), (2, 0), (4, 1), (8, 1)])
def test_the_tests_of_the_package_are_run(ends: int, status: int, builder: Builder) -> None:
    """With what was built; a skipped test is none that has failed, but none at all is."""
    summary = "autopkgtest [10:00:00]: @@@@@@@@@@@@@@@@@@@@ summary"
    builder.program(
        "autopkgtest",
        f'#!/bin/sh\necho "$@" >{builder.top.parent}/asked\necho noise\n'
        f"echo '{summary}'\necho 'nbd PASS'\nexit {ends}\n",
    )
    assert builder.run().returncode == 0
    assert not (builder.top.parent / "asked").exists()
    done = builder.run("--test")
    assert done.returncode == status, done.stderr
    words = (builder.top.parent / "asked").read_text().split()
    assert [words[0], *words[-2:]] == ["--no-built-binaries", "--", "null"]
    assert words[1].endswith("_amd64.deb") and words[2].endswith("/iserblk/")
    assert "\nnbd PASS\n" in done.stderr
    assert ("noise" in done.stderr) == ("(autopkgtest: status" in done.stderr) == bool(status)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--frobnicate"], "no such option"),
        (["--release", "sid"], "no such release"),
        (["--output"], "needs a value"),
        (["--keep", "x"], "for --release"),
    ],
)
def test_wrong_arguments(words: list[str], said: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "deb", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7
    assert said in done.stderr

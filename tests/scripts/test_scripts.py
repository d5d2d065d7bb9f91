"""The scripts that everything starts with."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.fuse import need_fuse
from tests.support.nbdkit import need
from tests.support.target import ROOT

SCRIPTS = (
    *("setup", "test", "demo", "distros", "release", "deb", "image", "sanitize", "manpages"),
    "docs",
    "fuzz",
    "mutations",
    "outage",
    "pins",
    "screenshots",
    "soak",
)


def script(
    name: str, *arguments: str, start: Path = ROOT, **changes: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(start / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ISERBLK_SET_UP": "", **changes},
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_is_the_head_of_the_file(name: str) -> None:
    done = script(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n  scripts/{name}" in done.stdout
    assert "#" not in done.stdout and "set -" not in done.stdout


@pytest.mark.parametrize("name", ["setup", "demo", "distros"])
def test_wrong_arguments_do_nothing(name: str) -> None:
    assert script(name, "--frobnicate").returncode == 7


def test_a_wrong_case_of_an_outage_sets_nothing_up(tmp_path: Path) -> None:
    """Compiling takes minutes."""
    for folder in ("outagelib", "benchlib", "lablib"):
        shutil.copytree(ROOT / "scripts" / folder, tmp_path / "scripts" / folder)
    for name in ("iserblk", "tests", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "scripts/outage", tmp_path / "scripts")
    setting_up = tmp_path / "scripts/setup"
    setting_up.write_text("#!/bin/sh\necho set up >&2\nexit 3\n")
    setting_up.chmod(0o755)
    done = script("outage", "--case", "frobnicate", start=tmp_path)
    assert done.returncode == 7 and "'frobnicate' is not one of" in done.stderr
    assert script("outage", "--case", "network", start=tmp_path).returncode == 3


def test_setting_up_again_does_nothing_and_says_nothing() -> None:
    """These tests run in what `scripts/setup --tests` made."""
    done = script("setup", "--tests")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_script_of_the_tests_sets_nothing_up(tmp_path: Path) -> None:
    """What others run is not compiled meanwhile."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup", tmp_path / "scripts")
    done = script("setup", start=tmp_path, ISERBLK_SET_UP="yes")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [each.name for each in tmp_path.rglob("*")] == ["scripts", "setup"]


def checkout_to_set_up(top: Path, wheels: Path) -> None:
    """A checkout that needs one Python package, which is in ``wheels``."""
    for folder in ("scripts", "iserblk/cli", "fuse_mount", "nbd_plugin"):
        (top / folder).mkdir(parents=True)
    for script_file in ("setup", "floors.py"):
        shutil.copy(ROOT / "scripts" / script_file, top / "scripts")
    (top / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\n[project]\ndependencies = ["needed"]\n'
        "[project.optional-dependencies]\nfuse = []\ndev = []\n"
    )
    (top / "iserblk/__init__.py").touch()
    (top / "iserblk/cli/__init__.py").touch()
    (top / "iserblk/cli/__main__.py").write_text("import needed\nprint(needed.__file__)\n")
    wheels.mkdir()
    about = "needed-1.dist-info"
    with zipfile.ZipFile(wheels / "needed-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("needed.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: needed\nVersion: 1\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", tags)
        wheel.writestr(f"{about}/RECORD", "")


def test_two_set_ups_at_once(tmp_path: Path) -> None:
    """The second, which begins while the first makes .venv, waits, and finds all of it there."""
    top, wheels, fakes = tmp_path / "top", tmp_path / "wheels", tmp_path / "bin"
    checkout_to_set_up(top, wheels)
    fakes.mkdir()
    for name, text in (("dpkg-query", "printf installed"), ("apt-cache", "exit 0")):
        (fakes / name).write_text(f"#!/bin/sh\n{text}\n")
        (fakes / name).chmod(0o755)
    env = {
        **os.environ,
        "ISERBLK_SET_UP": "",
        "PATH": f"{fakes}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    running: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        running.append(
            subprocess.Popen(
                [top / "scripts/setup", "--plain"], stderr=subprocess.PIPE, text=True, env=env
            )
        )
        return running[-1]

    try:
        first = begin()
        assert first.stderr is not None
        assert first.stderr.readline() == "setup: making .venv\n"
        second = begin()
        (_, said), (_, nothing) = first.communicate(), second.communicate()
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert (first.returncode, second.returncode) == (0, 0), said + nothing
    assert said.startswith("setup: installing Python packages") and nothing == ""
    done = subprocess.run(
        [top / ".venv/bin/iserblk"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.startswith(f"{top}/.venv/") and done.stderr == ""


def test_setup_sees_what_apt_has(tmp_path: Path) -> None:
    """However slowly apt-cache writes the rest of its answer."""
    fake = tmp_path / "apt-cache"
    fake.write_text(
        "#!/bin/sh\n"
        'case $2 in unheard-of) exit ;; virtual) version="(none)" ;; *) version=1.32.5-1 ;; esac\n'
        'printf "%s:\\n  Installed: (none)\\n  Candidate: %s\\n" "$2" "$version"\n'
        'sleep 0.2; printf "  Version table:\\n     1.32.5-1 500\\n"\n'
    )
    fake.chmod(0o755)
    lines = (ROOT / "scripts" / "setup").read_text().splitlines()
    start = lines.index("offered() {")
    function = "\n".join(lines[start : lines.index("}", start) + 1])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{function}\noffered nbdkit virtual unheard-of other"],
        capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.split() == ["nbdkit", "other"]


def test_the_command_is_found_from_anywhere(tmp_path: Path) -> None:
    """By a link, too, and without an activated environment."""
    link = tmp_path / "iserblk"
    link.symlink_to(ROOT / ".venv" / "bin" / "iserblk")
    done = subprocess.run(
        [str(link), "--version"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_does_not_run_what_lies_around(tmp_path: Path) -> None:
    """Root runs it, in directories of others, too."""
    (tmp_path / "iserblk").mkdir()
    (tmp_path / "iserblk" / "__init__.py").write_text("raise SystemExit(99)")
    done = subprocess.run(
        [str(ROOT / ".venv" / "bin" / "iserblk"), "--version"], check=False, cwd=tmp_path
    )
    assert done.returncode == 0


def left_of_demos(directory: Path) -> list[str]:
    """Files, mounts and processes that name ``directory``."""
    names = [str(directory), str(directory.resolve())]
    left = [path.name for path in directory.iterdir()]
    left += [line for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
             if any(name in line for name in names)]  # fmt: skip
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if any(name in words for name in names):
            left.append(words)
    return left


def test_demo(tmp_path: Path) -> None:
    need("nbdkit", "nbdinfo", "nbdcopy", "mkfs.ext4")
    need_fuse()
    done = script("demo", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checksums are the same" in done.stdout
    assert left_of_demos(tmp_path) == []


@pytest.mark.parametrize(
    ("after", "number", "status"),
    [
        pytest.param("2. ", signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param("4. ", signal.SIGINT, 130, marks=pytest.mark.long),
        ("5. ", signal.SIGTERM, 143),
    ],
)
def test_demo_cleans_up_when_it_is_stopped(
    after: str, number: int, status: int, tmp_path: Path
) -> None:
    need("nbdkit", "nbdinfo", "nbdcopy", "mkfs.ext4")
    need_fuse()
    with subprocess.Popen(
        [str(ROOT / "scripts" / "demo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith(after):
                demo.send_signal(number)
                break
        rest = demo.stdout.read()
    assert demo.returncode == status, rest
    assert left_of_demos(tmp_path) == []


# --- scripts/distros, with a debootstrap that makes a root of busybox -----------------------------

DEBOOTSTRAP = """#!/bin/sh
for argument; do case $argument in --*) shift ;; *) break ;; esac; done
echo "debootstrap $1" >>"$CALLS"
[ ! -e "$BROKEN" ] || { echo "E: made to fail"; exit 1; }
mkdir -p "$2/bin" "$2/usr/bin" "$2/etc" "$2/home" "$2/tmp"
for name in sh cat sleep touch; do cp "$BUSYBOX" "$2/bin/$name"; done
cp "$BUSYBOX" "$2/usr/bin/env"
cat >"$2/usr/bin/python3" <<'END'
#!/bin/sh
cat "$1" >/dev/null && echo "$@" && cd / && echo home/*
END
printf '#!/bin/sh\n' >"$2/usr/bin/apt-get"
chmod 755 "$2/usr/bin/python3" "$2/usr/bin/apt-get"
"""


class Distros:
    """``calls``: of debootstrap. ``place``: where the script makes roots, unless told otherwise."""

    def __init__(self, folder: Path, busybox: str) -> None:
        self.place, self.bin = folder / "place", folder / "bin"
        self.calls, self.broken = folder / "calls", folder / "broken"
        self.place.mkdir()
        self.bin.mkdir()
        self.calls.touch()
        self.program("debootstrap", DEBOOTSTRAP)
        self.changes = {
            "BUSYBOX": busybox,
            "CALLS": str(self.calls),
            "BROKEN": str(self.broken),
            "TMPDIR": str(self.place),
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PIP_NO_COLOR": "carried",
        }

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *arguments: str, start: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return script("distros", *arguments, start=start, **self.changes)


@pytest.fixture
def distros(tmp_path: Path) -> Distros:
    need("busybox", "unshare", "git")
    if os.geteuid() != 0:
        pytest.skip("only root can make roots")
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("this machine lets not even root make namespaces")
    busybox = shutil.which("busybox")
    assert busybox is not None
    return Distros(tmp_path, busybox)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--release", "woody"], "no such release: woody"),
        (["--release"], "--release needs a value"),
        (["--without", "nbdkit*"], "no name of a package: nbdkit*"),
        (["--mirror", "somewhere"], "no URL: somewhere"),
        (["--keep", ""], "--keep needs a directory"),
        (["--built", "/nonexistent"], "no such directory: /nonexistent"),
        (["--built", "/"], "--built is for --installed"),
        (["--installed", "true"], "--installed takes no command: true"),
        (["--installed", "--without", "fio"], "--installed and --without do not go together"),
        (["--frobnicate"], "no such option: --frobnicate"),
    ],
)
def test_distros_says_what_is_wrong_with_its_arguments(arguments: list[str], words: str) -> None:
    done = script("distros", *arguments)
    assert (done.returncode, done.stdout) == (7, "")
    (line,) = done.stderr.splitlines()
    assert words in line


def test_distros_needs_root(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = script("distros", PATH=f"{tmp_path}:{os.environ['PATH']}", TMPDIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "distros: debootstrap and chroot need root: run it as root\n"
    assert [path.name for path in tmp_path.iterdir()] == ["id"]


@pytest.mark.long
def test_distros_runs_the_command_in_a_clone_and_leaves_nothing(distros: Distros) -> None:
    script = (
        "cat scripts/demo >/dev/null && cat /etc/hosts >/dev/null && [ $PIP_NO_COLOR = carried ]"
    )
    done = distros.run("sh", "-c", f"{script} && [ -e /dev/null ] && [ $$ -lt 100 ] && echo done")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\ndone\ndone\n"
    names = ["bookworm", "trixie", "sid"]
    assert distros.calls.read_text().splitlines() == [f"debootstrap {name}" for name in names]
    last = done.stderr.splitlines()[-3:]
    assert [line.split(":")[0].strip() for line in last] == names
    assert all(": passed, " in line for line in last)
    assert left_of_demos(distros.place) == []


@pytest.mark.long
def test_distros_tells_of_a_command_that_fails(distros: Distros) -> None:
    """What it started stays behind, and is ended."""
    done = distros.run("--release", "13", "--", "sh", "-c", "sleep 1000 & exit 3")
    assert done.returncode == 1
    assert "trixie: sh -c sleep 1000 & exit 3: FAILED with status 3" in done.stderr
    assert left_of_demos(distros.place) == []


def test_distros_without_a_root_goes_on_to_the_next(distros: Distros) -> None:
    distros.broken.touch()
    done = distros.run("sh", "-c", "true")
    assert done.returncode == 1
    assert "E: made to fail" in done.stderr
    assert "\n  bookworm: FAILED, there is no root" in done.stderr
    assert "\n  trixie: FAILED, there is no root" in done.stderr
    assert "\n  sid: FAILED, there is no root" in done.stderr
    assert left_of_demos(distros.place) == []


@pytest.mark.long
def test_distros_uses_a_kept_root_again(distros: Distros) -> None:
    """With a new clone; the packages, that is all else, are those of before."""
    arguments = ["--release", "trixie", "--keep", str(distros.place / "kept")]
    first = distros.run(*arguments, "sh", "-c", "touch /was scripts/was")
    again = distros.run(*arguments, "sh", "-c", "[ -e /was ] && [ ! -e scripts/was ]")
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert distros.calls.read_text() == "debootstrap trixie\n"
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    assert (distros.place / "kept" / "trixie" / "was").exists() and str(distros.place) not in mounts


@pytest.mark.long
def test_distros_without_packages(distros: Distros) -> None:
    """The root's apt does not have them, and a kept root that has them is not used."""
    arguments = ["--release", "trixie", "--keep", str(distros.place / "kept")]
    pins = ["cat", "/etc/apt/preferences.d/distros"]
    usual = distros.run(*arguments, *pins)
    assert (usual.returncode, usual.stdout) == (0, ""), usual.stderr
    done = distros.run(*arguments, "--without", "nbdkit", "--without", "fio", *pins)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n\n") == [
        "Package: nbdkit nbdkit-*\nPin: release *\nPin-Priority: -1",
        "Package: fio fio-*\nPin: release *\nPin-Priority: -1",
        "",
    ]
    assert "\n  trixie without nbdkit without fio: cat " in done.stderr
    roots = sorted(path.name for path in (distros.place / "kept").iterdir() if path.is_dir())
    assert roots == ["trixie", "trixie-without-nbdkit-without-fio"]


@pytest.mark.long
def test_distros_carries_what_was_built_into_a_root_without_a_clone(
    distros: Distros, tmp_path: Path
) -> None:
    """Of each release: what is for its Python."""
    wheels = {
        "bookworm": "iserblk-1-cp311-cp311-any.whl",
        "trixie": "iserblk-1-cp313-cp313-any.whl",
        "sid": "iserblk-1-cp314-cp314-any.whl",
    }
    for release in wheels:
        (tmp_path / "built" / release).mkdir(parents=True)
        for name in wheels.values():
            (tmp_path / "built" / release / name).touch()
    (tmp_path / "built" / "trixie" / "iserblk_1_amd64.deb").touch()
    releases = [word for each in wheels for word in ("--release", each)]
    done = distros.run("--installed", "--built", str(tmp_path / "built"), *releases)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"installed.py --wheel {wheels['bookworm']}",
        "home/built",
        f"installed.py --wheel {wheels['trixie']} --package iserblk_1_amd64.deb",
        "home/built",
        f"installed.py --wheel {wheels['sid']}",
        "home/built",
    ]
    assert distros.calls.read_text().splitlines() == [f"debootstrap {each}" for each in wheels]
    assert left_of_demos(distros.place) == []


def test_distros_with_nothing_to_install(distros: Distros, tmp_path: Path) -> None:
    done = distros.run("--installed", "--built", str(tmp_path), "--release", "trixie")
    assert done.returncode == 1
    assert "\n  trixie, installed: FAILED, there is nothing to install in " in done.stderr
    assert left_of_demos(distros.place) == []


@pytest.mark.long
def test_distros_of_a_checkout_of_another_user(distros: Distros, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(other)], check=True)
    shutil.copy(ROOT / "scripts" / "distros", other / "scripts")
    for path in [other, *other.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    done = distros.run("--release", "bookworm", "cat", "scripts/demo", start=other)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (ROOT / "scripts" / "demo").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)]
)
def test_distros_cleans_up_when_it_is_stopped(distros: Distros, number: int, status: int) -> None:
    # A shell cannot trap what was ignored when it began, as SIGHUP is below nohup.
    words = ["env", "--default-signal=HUP", str(ROOT / "scripts" / "distros")]
    words += ["sh", "-c", "echo begun; sleep 1000"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **distros.changes}, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == status, said
    assert left_of_demos(distros.place) == []


# A set-up that locks as scripts/setup does, and makes a Python that notes what it is to run,
# and that looks at an iserblk which is compiled, or not.
SETTING_UP = """#!/usr/bin/env bash
[ "$1" = --lowest ] || exit 7
cd "$(dirname "$0")/.." && exec 9<"$PWD"
flock --timeout 5 9 || exit 9
mkdir -p .venv/bin
cat >.venv/bin/python <<'END'
#!/bin/sh
echo "$PWD $@" >>ran
[ "$1" = -m ] || PYTHONPATH=$PWD exec "$PYTHON" "$@"
END
chmod +x .venv/bin/python
"""


@pytest.mark.parametrize("why_plain", ["", "it is not compiled"])
def test_the_floors_are_tested_in_a_clone(tmp_path: Path, why_plain: str) -> None:
    """Which is set up while the run has the place for itself; twice, in the same place. It has to
    be compiled."""
    top = tmp_path / "top"
    for name in ("scripts", "iserblk"):
        (top / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/test", top / "scripts")
    for name, text in (("setup", SETTING_UP), ("peers", "#!/bin/sh\n")):
        (top / "scripts" / name).write_text(text)
        (top / "scripts" / name).chmod(0o755)
    (top / "iserblk/__init__.py").touch()
    (top / "iserblk/forms.py").write_text(f"why_plain = {why_plain!r}\n")
    (top / ".gitignore").write_text("/.venv/\n/ran\n")
    git = ["git", "-C", str(top), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHON": sys.executable}
    for _ in range(2):
        done = subprocess.run(
            [top / "scripts/test", "--lowest", "tests/x"],
            stderr=subprocess.PIPE, text=True, check=False, env=env,
        )  # fmt: skip
        assert done.returncode == bool(why_plain) and why_plain in done.stderr, done.stderr
    place = tmp_path / "cache/iserblk/lowest"
    tested = [line for line in (place / "ran").read_text().splitlines() if " -m " in line]
    assert tested == ([] if why_plain else [f"{place} -m pytest tests/x"] * 2)


# A set-up that counts how often it runs, and may end with a status; and a Python that only looks at
# iserblk, in the form that the first, or a later, set-up has made.
FAILING_SET_UP = """#!/usr/bin/env bash
[ -z "${STATUS-}" ] || exit "$STATUS"
cd "$(dirname "$0")/.."
echo "$*" >>set-ups
mkdir -p .venv/bin build
echo "cc: out of memory" >build/setup.log
[ "$(wc -l <set-ups)" = 1 ] && cp first.py iserblk/forms.py || cp later.py iserblk/forms.py
cat >.venv/bin/python <<'END'
#!/bin/sh
[ "$1" != -P ] || PYTHONPATH=$PWD exec "$PYTHON" "$@"
[ "$2" != pytest ] || "$PWD/scripts/of-a-test" >>tested
[ "$2" != mypy ] || exit "${MYPY-0}"
END
chmod +x .venv/bin/python
"""
PLAIN, COMPILED = "why_plain = 'it is not compiled'\n", "why_plain = ''\n"


def run_set_up(
    top: Path, first: str, later: str, status: str = "", words: str = "tests/x", **more: str
) -> tuple[int, str]:
    """The exit status of ``scripts/test WORDS`` and what it says; with fakes of all else, and
    ``more`` variables."""
    for name in ("scripts", "iserblk"):
        (top / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/test", top / "scripts")
    for name, text in (
        ("setup", FAILING_SET_UP),
        ("peers", "#!/bin/sh\n"),
        ("of-a-test", '#!/bin/sh\necho "set up: $ISERBLK_SET_UP"\n'),
        ("clock", "#!/bin/sh\necho none\n"),
        ("simulate", '#!/bin/sh\nexit "${SIMULATE-0}"\n'),
    ):
        (top / "scripts" / name).write_text(text)
        (top / "scripts" / name).chmod(0o755)
    (top / "iserblk/__init__.py").touch()
    (top / "first.py").write_text(first)
    (top / "later.py").write_text(later)
    env = {**os.environ, "PYTHON": sys.executable, "STATUS": status, "ISERBLK_SET_UP": "", **more}
    done = subprocess.run(
        [top / "scripts/test", words],
        stderr=subprocess.PIPE, text=True, check=False, env=env,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_tests_are_set_up_once_and_what_they_start_is_not(tmp_path: Path) -> None:
    status, said = run_set_up(tmp_path, COMPILED, PLAIN)
    assert status == 0 and "set up twice" not in said, said
    assert (tmp_path / "set-ups").read_text() == "--tests\n"
    assert (tmp_path / "tested").read_text() == "set up: yes\n"


def test_a_set_up_that_does_not_compile_is_tried_again_and_told(tmp_path: Path) -> None:
    status, said = run_set_up(tmp_path, PLAIN, COMPILED)
    assert status == 0, said
    assert said.endswith(
        "test: set up twice: it is not compiled\ntest: set up twice: cc: out of memory\n"
    )
    assert (tmp_path / "set-ups").read_text() == "--tests\n" * 2


@pytest.mark.parametrize(
    ("form", "why"), [(PLAIN, "it is not compiled"), ("broken", "iserblk cannot be imported")]
)
def test_tests_of_what_is_not_compiled_fail(tmp_path: Path, form: str, why: str) -> None:
    status, said = run_set_up(tmp_path, form, form)
    assert status == 1 and said.endswith(f"test: FAILED: set-up: {why}\n"), said
    assert (tmp_path / "set-ups").read_text() == "--tests\n" * 2
    assert (tmp_path / "tested").exists()


@pytest.mark.parametrize(
    ("fails", "names"),
    [({}, []), ({"MYPY": "1"}, ["mypy"]), ({"MYPY": "1", "SIMULATE": "1"}, ["mypy", "simulation"])],
)
def test_checks_that_run_beside_the_tests(
    fails: dict[str, str], names: list[str], tmp_path: Path
) -> None:
    status, said = run_set_up(tmp_path, COMPILED, PLAIN, words="--no-lab", **fails)
    told = [f"test: FAILED: {name}" for name in names]
    assert status == bool(names), said
    assert re.search(r"^test: took: mypy \d+ s, simulation \d+ s$", said, re.MULTILINE), said
    # Where the checks have ended, and at the end of all.
    assert [line for line in said.splitlines() if "FAILED" in line] == told * 2, said
    assert (tmp_path / "tested").read_text().count("set up: yes\n") > 2


def test_a_set_up_that_fails_ends_the_tests(tmp_path: Path) -> None:
    assert run_set_up(tmp_path, COMPILED, COMPILED, "3") == (3, "")
    assert not (tmp_path / "tested").exists()

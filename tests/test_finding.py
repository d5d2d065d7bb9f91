"""Every module has its test module where one looks for it, and no two are of one name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGES = ("iserblk", "fuse_mount", "nbd_plugin")

# Modules without a test module of their own, and where they are tested instead; or why not.
ELSEWHERE: dict[str, str] = {}


def modules() -> list[str]:
    """Paths from the project's root, without those that do nothing but stand for a package."""
    found = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return sorted(
        str(path.relative_to(ROOT)) for path in found if path.name not in ("__init__.py",)
    )


def every_test() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def mirrored(module: str) -> list[Path]:
    """Its test modules: at the place in tests/ that mirrors its own, ``test_`` and its name; behind
    that, what tells them apart, where there are several; before it a package's name, where another
    module has the same."""
    path = Path(module).with_suffix("")
    place = (
        TESTS / path.parent.relative_to("iserblk")
        if path.parts[0] == "iserblk"
        else TESTS / path.parent
    )
    names = [path.name, *(f"{package}_{path.name}" for package in path.parts[:-1])]
    return [
        found
        for found in place.glob("test_*.py")
        if any(f"{found.stem}_".startswith(f"test_{name}_") for name in names)
    ]


@pytest.mark.parametrize("module", modules())
def test_a_module_has_its_test_module(module: str) -> None:
    if module in ELSEWHERE:
        assert not mirrored(module), f"{module}: has its test module, and is in the list, too"
        return
    assert mirrored(module), f"{module}: where is it tested?"


def test_the_list_is_current() -> None:
    known = set(modules())
    for module, reason in ELSEWHERE.items():
        assert module in known, f"{module}: there is none"
        for word in reason.replace(",", " ").split():
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), f"{module}: {word} is not there"


def test_no_two_test_modules_of_one_name() -> None:
    names = Counter(path.name for path in every_test())
    assert {name for name, count in names.items() if count > 1} == set()

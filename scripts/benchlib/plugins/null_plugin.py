"""An nbdkit Python plugin that does nothing: the ceiling of any plugin written in Python.

    nbdkit python null_plugin.py size=BYTES [sleep_us=N]

With ``sleep_us`` every pread and pwrite waits that long without the GIL, as a plugin that talks to
a target must: the ceiling of a plugin that gives up the GIL in each request.
"""

from __future__ import annotations

import time

import nbdkit

API_VERSION = 2

_settings = {"size": 0, "sleep_us": 0}
_sleep_s = 0.0


def thread_model() -> int:
    return int(nbdkit.THREAD_MODEL_PARALLEL)


def config(key: str, value: str) -> None:
    if key not in _settings:
        raise ValueError(f"unknown parameter {key}=; there are {', '.join(_settings)}")
    _settings[key] = int(value)


def config_complete() -> None:
    global _sleep_s  # noqa: PLW0603 - read by every request, set once
    _sleep_s = _settings["sleep_us"] / 1e6


def open(readonly: bool) -> int:
    return 1


def get_size(_handle: int) -> int:
    return _settings["size"]


def pread(_handle: int, buffer: bytearray, offset: int, flags: int) -> None:
    if _sleep_s:
        time.sleep(_sleep_s)


def pwrite(_handle: int, buffer: bytearray, offset: int, flags: int) -> None:
    if _sleep_s:
        time.sleep(_sleep_s)


def flush(_handle: int, flags: int) -> None:
    pass

from __future__ import annotations

import signal

import pytest
import trio

from iserblk.waiting.descriptors import signals_noted


class Ended(Exception):
    pass


def end(_number: int, _frame: object) -> None:
    raise Ended


def test_signals_around_trio_are_noted() -> None:
    """Before trio takes them and after it has given them back; then the handlers are as before."""
    seen = []

    async def body() -> None:
        signal.raise_signal(signal.SIGUSR1)
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            signal.raise_signal(signal.SIGUSR1)
            seen.append(await anext(signals))
        signal.raise_signal(signal.SIGUSR2)

    before = {number: signal.signal(number, end) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        with signals_noted(signal.SIGUSR1, signal.SIGUSR2) as noted:
            trio.run(body)
        assert (seen, noted) == ([signal.SIGUSR1], [signal.SIGUSR1, signal.SIGUSR2])
        with pytest.raises(Ended):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

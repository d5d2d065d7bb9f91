"""A target with two portal groups, and a fault proxy before each of its portals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from tests.cli.commands import Server, good_json, serving
from tests.support.faults.proxy import FaultProxy, Plan, nothing
from tests.support.target import IQN
from tests.support.until import until

PATIENCE_S = 60.0


def both(one: str, two: str) -> list[str]:
    """LUN 0 through both."""
    return [f"{one}/0", f"{two}/0"]


@contextmanager
def two_portals(
    ports: tuple[int, int], plan: Plan = nothing, framing: str = "raw"
) -> Iterator[tuple[FaultProxy, FaultProxy]]:
    """``plan`` is of the first one."""
    with (
        FaultProxy(("127.0.0.1", ports[0]), plan, framing) as one,
        FaultProxy(("127.0.0.1", ports[1]), nothing, "raw") as two,
    ):
        yield one, two


class Ported:
    """A target with two portal groups, and a proxy before each."""

    def __init__(self, server: Server, states: Path, proxies: tuple[FaultProxy, FaultProxy]):
        self._server = server
        self._states = states
        self.one, self.two = proxies

    def urls(self, scheme: str = "iser") -> list[str]:
        url = self._server.url.replace("iser", scheme, 1)
        return both(self.one.through(url), self.two.through(url))

    async def set(self, *states: str) -> None:
        text = "".join(f"{tag} {state}\n" for tag, state in enumerate(states, 1))
        self._states.write_text(text)
        before = self._server.log.read_text().count("read again")
        self._server.process.send_signal(signal.SIGHUP)
        with trio.fail_after(PATIENCE_S):
            await until(lambda: self._server.log.read_text().count("read again") != before)


@contextmanager
def ported_target(
    tmp_path: Path, plan: Plan = nothing, framing: str = "raw", size: int = 1 << 20
) -> Iterator[Ported]:
    states = tmp_path / "states"
    states.write_text("")
    arguments = ["-v", "target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size={size}"]
    arguments += ["--listen", "127.0.0.1:0,1", "--listen", "127.0.0.1:0,2"]
    arguments += ["--access-states", str(states)]
    with serving(*arguments, log=tmp_path / "log") as server:
        listen = server.url.removeprefix("iser://").partition("/")[0]
        (found,) = good_json("discover", f"iscsi://{listen}")["targets"]
        first, second = [each["port"] for each in found["portals"]]
        with two_portals((first, second), plan, framing) as proxies:
            yield Ported(server, states, proxies)

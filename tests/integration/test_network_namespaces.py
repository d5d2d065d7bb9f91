"""Two network namespaces on one machine, as two containers have them: a server of ours in each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cli.commands import serving
from tests.support.namespaces import Host, make_host, need
from tests.support.programs import run
from tests.support.target_elsewhere import our_target

SIZE = 1 << 20
HERE = "127.0.0.1"


@contextmanager
def server(host: Host, url: str, socket: Path) -> Iterator[str]:
    """``iserblk nbd`` in the namespace, until it is killed; yields its NBD URI."""
    words = ("nbd", url, "--socket", socket)
    with serving(*words, log=socket.with_suffix(".log"), namespace=host.name):
        yield f"nbd+unix:///?socket={socket}"


def connections(within: list[str]) -> int:
    """Of initiators, to the targets' port."""
    command = [*within, "ss", "-Htn", "state", "established", "( dport = :3260 )"]
    return len(run(*command).splitlines())


def test_one_of_ours_in_each(tmp_path: Path) -> None:
    """Each has its target at the same address, and a server that finds that one. The connection is
    in the namespace alone, and ends with the server."""
    need("ss", "nbdcopy")
    here = connections([])
    with ExitStack() as stack:
        hosts = [make_host(stack, role) for role in ("one", "other")]
        servers = ExitStack()
        with servers:
            for host in hosts:
                disk = tmp_path / host.name
                disk.write_bytes(os.urandom(SIZE))
                url = stack.enter_context(our_target(host, HERE, [disk]))
                uri = servers.enter_context(
                    server(host, f"{url}/0", tmp_path / f"{host.name}.sock")
                )
                run("nbdcopy", uri, tmp_path / "copy")
                assert (tmp_path / "copy").read_bytes() == disk.read_bytes()
            assert [connections(host.within) for host in hosts] == [1, 1]
            assert connections([]) == here
        assert [connections(host.within) for host in hosts] == [0, 0]

"""Reports that a foreground command is ready: one line on stdout, and a message to systemd."""

from __future__ import annotations

import logging
import os
import socket

import click

log = logging.getLogger(__name__)


def ready(url: str) -> None:
    """Print ``ready URL`` and tell the service manager."""
    click.echo(f"ready {url}")
    tell_systemd("READY=1")


def tell_systemd(state: str) -> None:
    """sd_notify(3): a datagram to the socket named by NOTIFY_SOCKET, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect(address)
            sock.send(state.encode())
        except OSError as error:
            log.warning("NOTIFY_SOCKET: %s", error.strerror)

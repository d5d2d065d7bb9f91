"""Connect and log in: from a URL to a Session in full feature phase. Runs in trio."""

from __future__ import annotations

import trio

from iserblk.datamover.iser import ZBVA_NOT_SUPPORTED, ConnectionFlags
from iserblk.errors import ConnectTimeout
from iserblk.initiator.connect_iwarp import connect_iwarp, resolve
from iserblk.initiator.login import Login
from iserblk.initiator.session import Session
from iserblk.url import Options, Url

CONNECT_TIMEOUT_S = 10.0
LOGIN_TIMEOUT_S = 20.0
READ_DEPTH = 64  # RDMA Reads that a target may have outstanding: IRD


async def connect(url: Url, options: Options) -> Session:
    """A session with the target of ``url``. Its driver is the caller's to start.

    Raises TransportError, LoginError and their kin; then nothing is left open.
    """
    portal = f"[{url.host}]:{url.port}" if ":" in url.host else f"{url.host}:{url.port}"
    qp = await connect_iwarp(
        await resolve(url.host, url.port),
        portal,
        CONNECT_TIMEOUT_S,
        private_data=ConnectionFlags(ZBVA_NOT_SUPPORTED).pack(),
        crc=options.mpa_crc,
        ird=READ_DEPTH,
    )
    try:
        with trio.fail_after(LOGIN_TIMEOUT_S):
            return await Login(qp, url, options, portal).run()
    except trio.TooSlowError:
        qp.close()
        raise ConnectTimeout(
            f"{portal}: no login within {LOGIN_TIMEOUT_S:g} s; does the target answer others?"
        ) from None
    except BaseException:
        qp.close()
        raise

"""Access to pyverbs, loaded at first use; constants of libibverbs and librdmacm.

The constants are part of the binary interface of the libraries and of the kernel. pyverbs has them
as attributes of enum classes, which are slower and unknown to type checkers.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Any

from iserblk.errors import NotSupported
from iserblk.installation import no_pyverbs

# ibv_wr_opcode
WR_RDMA_WRITE = 0
WR_SEND = 2
WR_RDMA_READ = 4
WR_SEND_WITH_INV = 9

# ibv_send_flags
SIGNALED = 2
SOLICITED = 4

# ibv_access_flags
LOCAL_WRITE = 1
REMOTE_WRITE = 2
REMOTE_READ = 4
MW_BIND = 16

# ibv_wc_flags. rxe of Linux 6.1 reports its kernel's bit instead of the library's.
WC_WITH_INV = 8
WC_INVALIDATED = WC_WITH_INV | 4

# ibv_device_cap_flags, ibv_mw_type, ibv_qp_state, ibv_qp_type
DEVICE_MW_TYPE_2 = 1 << 23 | 1 << 24  # 2A, 2B
LINK_ETHERNET = 2
MW_TYPE_2 = 2
QPS_INIT, QPS_RTR, QPS_RTS, QPS_ERR = 1, 2, 3, 6
QPT_RC = 2
QP_STATE = 1  # ibv_qp_attr_mask
INIT_ATTR_PD = 1  # ibv_qp_init_attr_mask

# rdma_port_space, rdma_getaddrinfo's flags
PS_TCP = 0x0106
RAI_NUMERICHOST = 2

_modules: dict[str, Any] = {}


def pyverbs(name: str) -> Any:
    """The module ``pyverbs.<name>``. Raises NotSupported when it cannot be loaded."""
    module = _modules.get(name)
    if module is None:
        module = _modules[name] = _load(name)
    return module


def _load(name: str) -> ModuleType:
    # pyverbs configures the root logger when it is imported, which only a program should do.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise NotSupported(
            f"pyverbs cannot be loaded ({error}): {no_pyverbs()}; or say rcap=iwarp"
        ) from None
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def gaps() -> Any | None:
    """The compiled module ``_gaps``; None where it cannot be loaded: ``engine.PlainEngine`` then
    does what pyverbs alone can do. Raises NotSupported without pyverbs."""
    if "_gaps" not in _modules:
        pyverbs("cmid")  # its types come first
        try:
            module: Any = importlib.import_module("iserblk.rcap.verbs._gaps")
        except (ImportError, ValueError) as error:  # ValueError: an object has another size
            logging.getLogger(__name__).info("compiled verbs module not used: %s", error)
            module = None
        _modules["_gaps"] = module
    return _modules["_gaps"]


def error_words(error: BaseException) -> str:
    """The system's error text in a pyverbs exception, without the words that pyverbs adds."""
    text = str(error)
    return text.rsplit("Errno: ", 1)[-1].partition(", ")[2] or text

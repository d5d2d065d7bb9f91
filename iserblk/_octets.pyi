from collections.abc import Callable
from typing import Any

class Layout:
    pack_into: Callable[..., None]
    unpack_from: Callable[..., Any]

    def __init__(self, format: str) -> None: ...

def is_flat(buffer: memoryview, writable: bool) -> bool: ...

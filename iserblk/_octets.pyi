from collections.abc import Callable

class Packer:
    pack_into: Callable[..., None]

    def __init__(self, format: str) -> None: ...

def is_flat(buffer: memoryview, writable: bool) -> bool: ...

from mmap import mmap

def look(
    buffer: bytes | memoryview | mmap, at: int, stop: int, crc: bool
) -> tuple[int, int, int, int, int, bool]: ...
def place(
    target: memoryview, to: int, source: memoryview | mmap, start: int, size: int
) -> None: ...
def fill_send(
    frame: memoryview, ulpdu: int, control: int, invalidate: int, msn: int, crc: bool
) -> None: ...
def around_tagged(
    data: memoryview, control: int, stag: int, to: int, crc: bool
) -> tuple[bytes, bytes]: ...

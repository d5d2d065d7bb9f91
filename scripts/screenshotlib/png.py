"""PNG pictures in fewer colours (PNG specification, third edition): 256 of a palette in place of
eight bits for each of red, green and blue. Pictures of text lose nothing that is seen, and two
thirds of their bytes."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = struct.Struct(">IIBBBBB")
_RGB, _PALETTE, _RGBA = 2, 3, 6
_MOST = 256


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height in pixels. Raises ValueError for what is no PNG."""
    width, height, *_ = _header(data)
    return width, height


def reduced(data: bytes) -> bytes:
    """A PNG of 8-bit RGB or RGBA, without interlacing, with a palette; the picture as it was if it
    is of another kind. Raises ValueError for what is no PNG."""
    width, height, depth, colour, _, _, interlaced = _header(data)
    if depth != 8 or colour not in (_RGB, _RGBA) or interlaced:
        return data
    size = 4 if colour == _RGBA else 3
    packed = b"".join(body for kind, body in _chunks(data) if kind == b"IDAT")
    rows = _unfiltered(zlib.decompress(packed), width * size, height, size)
    pixels = [_rgb(row, size) for row in rows]
    palette, numbers = _palette(Counter(pixel for row in pixels for pixel in row))
    lines = b"".join(b"\0" + bytes(numbers[pixel] for pixel in row) for row in pixels)
    chunks = [
        (b"IHDR", _HEADER.pack(width, height, 8, _PALETTE, 0, 0, 0)),
        (b"PLTE", b"".join(bytes(each) for each in palette)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def _header(data: bytes) -> tuple[int, ...]:
    if not data.startswith(_SIGNATURE) or data[12:16] != b"IHDR" or len(data) < 33:
        raise ValueError("not a PNG")
    return _HEADER.unpack(data[16:29])


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(_SIGNATURE)
    while at + 8 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        at += 12 + length


def _unfiltered(data: bytes, stride: int, height: int, size: int) -> list[bytes]:
    """The rows of pixels (section 9, Filtering). ``size``: bytes of a pixel."""
    rows: list[bytes] = []
    above = bytes(stride)
    for number in range(height):
        at = number * (stride + 1)
        kind, row = data[at], bytearray(data[at + 1 : at + 1 + stride])
        for index in range(stride) if kind else ():
            left = row[index - size] if index >= size else 0
            if kind == 1:
                guess = left
            elif kind == 2:
                guess = above[index]
            elif kind == 3:
                guess = (left + above[index]) // 2
            else:
                corner = above[index - size] if index >= size else 0
                guess = _paeth(left, above[index], corner)
            row[index] = (row[index] + guess) & 0xFF
        above = bytes(row)
        rows.append(above)
    return rows


def _paeth(left: int, above: int, corner: int) -> int:
    estimate = left + above - corner
    to_left, to_above = abs(estimate - left), abs(estimate - above)
    to_corner = abs(estimate - corner)
    if to_left <= to_above and to_left <= to_corner:
        return left
    return above if to_above <= to_corner else corner


def _rgb(row: bytes, size: int) -> list[tuple[int, int, int]]:
    """Pixels without their opacity: pages have a background."""
    return list(zip(row[0::size], row[1::size], row[2::size], strict=True))


def _palette(
    counts: Counter[tuple[int, int, int]],
) -> tuple[list[tuple[int, int, int]], dict[tuple[int, int, int], int]]:
    """The most frequent colours, and for each colour the number of the nearest of these."""
    palette = [pixel for pixel, _ in counts.most_common(_MOST)]
    numbers = {pixel: number for number, pixel in enumerate(palette)}
    for pixel in counts:
        if pixel not in numbers:
            numbers[pixel] = min(
                range(len(palette)), key=lambda number: _distance(pixel, palette[number])
            )
    return palette, numbers


def _distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))

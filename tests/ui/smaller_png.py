"""Writes pictures of Chromium again with at most 256 colors, which takes half of the space or less.

    smaller_png.py FILE...
"""

import collections
import struct
import sys
import zlib


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def pixels(png):
    """Width, and the rows of a PNG of Chromium: 8 bits per channel, not interlaced."""
    place, packed = 8, b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, data = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += 12 + length
        if kind == b"IHDR":
            width, height, _, color = struct.unpack(">IIBB", data[:10])
        elif kind == b"IDAT":
            packed += data
    channels = {2: 3, 6: 4}[color]
    raw, size = zlib.decompress(packed), width * channels
    rows, above = [], bytearray(size)
    for number in range(height):
        start = number * (size + 1)
        method, row = raw[start], bytearray(raw[start + 1 : start + 1 + size])
        for index in range(size if method else 0):
            left = row[index - channels] if index >= channels else 0
            up = above[index]
            if method == 1:
                guess = left
            elif method == 2:
                guess = up
            elif method == 3:
                guess = (left + up) // 2
            else:
                corner = above[index - channels] if index >= channels else 0
                far = left + up - corner
                guess = min((abs(far - left), 0, left), (abs(far - up), 1, up), (abs(far - corner), 2, corner))[2]
            row[index] = (row[index] + guess) & 255
        rows.append([bytes(row[index : index + 3]) for index in range(0, size, channels)])
        above = row
    return width, rows


def smaller(png):
    """The same picture with at most 256 colors."""
    width, rows = pixels(png)
    counts = collections.Counter(pixel for row in rows for pixel in row)
    palette = [color for color, _ in counts.most_common(256)]
    nearest = {color: number for number, color in enumerate(palette)}
    for color in counts:
        if color not in nearest:
            distances = [sum(abs(a - b) for a, b in zip(color, other)) for other in palette]
            nearest[color] = distances.index(min(distances))
    raw = b"".join(b"\0" + bytes(map(nearest.__getitem__, row)) for row in rows)
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    parts = [(b"IHDR", header), (b"PLTE", b"".join(palette)), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]
    return png[:8] + b"".join(chunk(kind, data) for kind, data in parts)


for path in sys.argv[1:]:
    with open(path, "rb") as file:
        picture = smaller(file.read())
    with open(path, "wb") as file:
        file.write(picture)

"""Compressed files as streams of bytes that take little memory, and that say so where a file was cut short."""

import gzip
import io
import lzma
import zlib
from typing import IO

import zstandard

PIECE = 1 << 15  # bytes
XZ_MEMORY = 1 << 28  # bytes that unpacking .xz may take, of which `xz -9` asks for 65 MiB; .zst has a limit of its own
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError)
ZST, SKIPPABLE = 0xFD2FB528, 0x184D2A5  # of a frame's first four bytes; the last half byte of the second is free
IN_THE_MIDST = "it ends in the midst of a stream"


def open_gz(raw: IO[bytes]) -> IO[bytes]:
    return gzip.open(raw, "rb")


def open_xz(raw: IO[bytes]) -> IO[bytes]:
    """As `lzma.open`, but a file cannot ask for gigabytes of dictionary."""
    return io.BufferedReader(_Xz(raw), PIECE)


def open_zst(raw: IO[bytes]) -> IO[bytes]:
    """As `zstandard.open`, but a file that was cut short is told from a whole one."""
    return zstandard.open(_Frames(raw), "rb")


OPENERS = {".gz": open_gz, ".xz": open_xz, ".zst": open_zst}


class _Xz(io.RawIOBase):
    """The streams of an .xz file one behind the other."""

    def __init__(self, raw: IO[bytes]):
        self._raw, self._decoder = raw, lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data, more = b"", b""
        while not data:
            if self._decoder.eof:
                more = self._decoder.unused_data.lstrip(b"\0")  # padding
                while not more and (block := self._raw.read(PIECE)):
                    more = block.lstrip(b"\0")
                if not more:
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            elif self._decoder.needs_input and not (more := self._raw.read(PIECE)):
                raise EOFError(IN_THE_MIDST)
            data = self._decoder.decompress(more, len(buffer))
            more = b""
        buffer[: len(data)] = data
        return len(data)


class _Frames:
    """Follows the frames and blocks of an .zst file (RFC 8878, section 3.1) while they are read."""

    def __init__(self, raw: IO[bytes]):
        self._raw, self._head, self._skip = raw, b"", 0
        self._next, self._want = self._magic, 4

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(size)
        if not data and (self._head or self._skip or self._next != self._magic):
            raise EOFError(IN_THE_MIDST)
        self._follow(memoryview(data))
        return data

    def close(self) -> None:
        """The file behind it is closed by whoever opened it."""

    def _follow(self, data: memoryview) -> None:
        while data:
            if self._skip:
                step = min(self._skip, len(data))
                self._skip, data = self._skip - step, data[step:]
                continue
            step = self._want - len(self._head)
            self._head, data = self._head + bytes(data[:step]), data[step:]
            if len(self._head) == self._want:
                head, self._head = self._head, b""
                self._next, self._want, self._skip = self._next(head)

    def _magic(self, head: bytes) -> tuple:
        number = int.from_bytes(head, "little")
        if number >> 4 == SKIPPABLE:
            return self._skippable, 4, 0
        return (self._header, 1, 0) if number == ZST else (self._magic, 4, 1 << 62)  # the decompressor says it is none

    def _skippable(self, head: bytes) -> tuple:
        return self._magic, 4, int.from_bytes(head, "little")

    def _header(self, head: bytes) -> tuple:
        size, single, checked, dictionary = head[0] >> 6, head[0] >> 5 & 1, head[0] >> 2 & 1, head[0] & 3
        self._checksum = 4 * checked
        return self._block, 3, (not single) + (0, 1, 2, 4)[dictionary] + (single, 2, 4, 8)[size]

    def _block(self, head: bytes) -> tuple:
        bits = int.from_bytes(head, "little")
        last, repeated, size = bits & 1, bits >> 1 & 3 == 1, bits >> 3
        skip = 1 if repeated else size
        return (self._magic, 4, skip + self._checksum) if last else (self._block, 3, skip)

"""Compressed files as byte streams that need little memory and raise an error if the file was cut short."""

import gzip
import io
import lzma
import zlib
from typing import IO

PIECE = 1 << 15  # bytes
XZ_MEMORY = 1 << 28  # bytes that unpacking .xz may use; `xz -9` needs 65 MiB; .zst has its own limit
BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)  # an OSError with an errno comes from the file system instead


def open_gz(raw: IO[bytes]) -> IO[bytes]:
    return gzip.open(raw, "rb")


def open_xz(raw: IO[bytes]) -> IO[bytes]:
    """Like `lzma.open`, but with a limit on memory, so that a file cannot demand a dictionary of gigabytes."""
    return io.BufferedReader(_Xz(raw), PIECE)


def open_zst(raw: IO[bytes]) -> IO[bytes]:
    """Uses Arrow, which detects a file that was cut short."""
    import pyarrow

    return pyarrow.CompressedInputStream(raw, "zstd")


OPENERS = {".gz": open_gz, ".xz": open_xz, ".zst": open_zst}


class _Xz(io.RawIOBase):
    """Reads the concatenated streams of an .xz file."""

    def __init__(self, raw: IO[bytes]):
        self._raw, self._decoder = raw, lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data, more = b"", b""
        while not data:
            if self._decoder.eof:
                more = self._decoder.unused_data.lstrip(b"\0")  # padding between streams
                while not more and (block := self._raw.read(PIECE)):
                    more = block.lstrip(b"\0")
                if not more:
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            elif self._decoder.needs_input and not (more := self._raw.read(PIECE)):
                raise EOFError("it ends in the middle of a stream")
            data = self._decoder.decompress(more, len(buffer))
            more = b""
        buffer[: len(data)] = data
        return len(data)

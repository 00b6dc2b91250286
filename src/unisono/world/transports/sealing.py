"""What passes through an encrypted connection after its handshake: frames of AES-GCM, made by OpenSSL's libcrypto.

TLS gives out what has come in records of 16 KiB, and each is a call of Python: with several lanes in one process, most
of the time went into passing the interpreter's lock around. So the rank that connects draws a key, sends it through TLS
once both ends have proven the run's secret (encryption.py), and from then on the connection carries frames of up to 2
MiB, each encrypted by one call that needs no lock. libcrypto is the one that Python's own `ssl` has loaded; a Python
that has it built in, and systems other than Linux, stay with TLS. See decision 22.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import hmac
import os
import re
import secrets
import socket
import ssl  # noqa: F401 - loads libcrypto
import struct
import time
import weakref
from typing import Any

import numpy

from unisono.launchers.runtime.encryption import make_pair

__all__ = ["Sealed", "can_seal", "draw_key", "is_available", "measure_speed", "seal"]

_FRAME = 2 << 20  # bytes of a message that are encrypted in one go: a piece of a ring
_FRAMES_PER_KEY = 1 << 15  # then both ends derive the next one: at most 64 GiB under one key
_AHEAD = 64 << 10  # bytes that are read before a frame's length is known: small frames come with one call
_HEAD = struct.Struct("<I")
_TAG, _KEY = 16, 16
_GET_TAG, _SET_TAG = 0x10, 0x11  # of EVP_CIPHER_CTX_ctrl
_MEASURED, _TRIALS = 64 << 10, 20  # bytes that fit into a pair of sockets; how often they pass
_SMALL = 64  # bytes of a message that are compared if it could not leave and another is given in its place


class _Library:
    """The functions of libcrypto, from 1.1 on. `update` lets other threads run meanwhile; the others are short."""

    def __init__(self, path: str) -> None:
        quick, slow = ctypes.PyDLL(path), ctypes.CDLL(path)
        self.new = self._take(quick, "EVP_CIPHER_CTX_new", ctypes.c_void_p)
        self.free = self._take(quick, "EVP_CIPHER_CTX_free", None, 1)
        self.aes = self._take(quick, "EVP_aes_128_gcm", ctypes.c_void_p)
        self.begin = self._take(quick, "EVP_CipherInit_ex", ctypes.c_int, 5, [ctypes.c_int])
        self.update = self._take(slow, "EVP_CipherUpdate", ctypes.c_int, 4, [ctypes.c_int])
        self.end = self._take(quick, "EVP_CipherFinal_ex", ctypes.c_int, 3)
        self.control = self._take(quick, "EVP_CIPHER_CTX_ctrl", ctypes.c_int, 1, [ctypes.c_int] * 2 + [ctypes.c_void_p])

    @staticmethod
    def _take(library: Any, name: str, gives: Any, pointers: int = 0, more: list[Any] | None = None) -> Any:
        function = getattr(library, name)
        function.restype, function.argtypes = gives, [ctypes.c_void_p] * pointers + (more or [])
        return function


@functools.cache
def _load() -> _Library | None:
    """The libcrypto that this process has; None if there is none, or not one that does what is expected."""
    with contextlib.suppress(OSError, AttributeError):
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = [line.split()[-1] for line in file if "/libcrypto.so" in line and "r-x" in line]
        library = _Library(paths[0]) if paths else None
        return library if library is not None and _is_right(library) else None
    return None


def _is_right(library: _Library) -> bool:
    """Whether a known text becomes what the standard says: test case 2 of McGrew and Viega's paper on GCM."""
    text, sealed = numpy.zeros(16, numpy.uint8), numpy.zeros(16 + _TAG, numpy.uint8)
    cipher = _Cipher(bytes(_KEY), encrypts=True, library=library)
    return cipher.run(sealed, text, 16) and sealed.tobytes().hex() == (
        "0388dace60b6a392f328c2b971b2fe78" + "ab6e47d42cec13bdf53a67b21257bddf"
    )


def is_available() -> bool:
    """Whether frames can be made here."""
    return _load() is not None


class _Cipher:
    """One direction of a connection. Frames are numbered, and the number is what makes each differ."""

    def __init__(self, key: bytes, *, encrypts: bool, library: _Library | None = None) -> None:
        library = _load() if library is None else library
        assert library is not None
        self._library, self._key, self._encrypts = library, key, encrypts
        self._context = library.new()
        weakref.finalize(self, library.free, self._context).atexit = False  # worlds are closed then
        self._number = 0
        self._count = numpy.zeros(1, numpy.int32)
        self._counted = self._count.ctypes.data
        self._set_key()

    def run(self, target: Any, source: Any, size: int) -> bool:
        """Encrypt `size` bytes and put a tag behind, or take both and decrypt; whether that is in order."""
        library, context = self._library, self._context
        into, out_of = target.ctypes.data, source.ctypes.data
        if self._number == _FRAMES_PER_KEY:
            self._key = hmac.digest(self._key, b"unisono, the next key", hashlib.sha256)[:_KEY]
            self._set_key()
        nonce = self._number.to_bytes(12, "little")
        self._number += 1
        done = library.begin(context, None, None, None, nonce, -1)
        done &= library.update(context, into, self._counted, out_of, size)
        if not self._encrypts:
            done &= library.control(context, _SET_TAG, _TAG, out_of + size)
        done &= library.end(context, into + size, self._counted)
        if self._encrypts:
            done &= library.control(context, _GET_TAG, _TAG, into + size)
        return bool(done == 1)

    def _set_key(self) -> None:
        self._number = 0
        if self._library.begin(self._context, self._library.aes(), None, self._key, None, int(self._encrypts)) != 1:
            raise OSError("libcrypto does not take a key for AES-GCM")


class Sealed(socket.socket):
    """A connection that carries frames. One thread may send while another receives; it never blocks."""

    def __init__(self, sock: socket.socket, sends: bytes, receives: bytes) -> None:
        """Take the place of an encrypted connection, with a key for what is sent and one for what is received."""
        super().__init__(sock.family, sock.type, sock.proto, fileno=os.dup(sock.fileno()))
        self.setblocking(False)
        sock.close()
        self._encrypt, self._decrypt = _Cipher(sends, encrypts=True), _Cipher(receives, encrypts=False)
        self._out = numpy.empty(_HEAD.size + _FRAME + _TAG, numpy.uint8)  # the frame that leaves
        self._at = self._end = self._taken = 0
        self._given = b""
        self._in = numpy.empty(2 * _HEAD.size + _FRAME + _TAG + _AHEAD, numpy.uint8)
        self._start = self._have = 0  # what has come and was not decrypted
        self._plain = memoryview(b"")  # what was decrypted and did not fit

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        """How many bytes have left. A frame that does not leave at once is kept: give the same bytes again."""
        view = memoryview(data)[:_FRAME]
        if self._at < self._end:
            self._flush()
            if self._given in (b"", bytes(view[: _SMALL + 1])):
                return self._taken
        size = self._taken = len(view)
        self._given = bytes(view) if size <= _SMALL else b""
        _HEAD.pack_into(self._out.data, 0, size)
        if not self._encrypt.run(self._out[_HEAD.size :], numpy.frombuffer(view, numpy.uint8), size):
            raise ConnectionResetError("libcrypto could not encrypt")
        self._at, self._end = 0, _HEAD.size + size + _TAG
        self._flush()
        return size

    def _flush(self) -> None:
        while self._at < self._end:
            self._at += super().send(self._out[self._at : self._end].data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        room = bytearray(size)
        return bytes(memoryview(room)[: self.recv_into(memoryview(room))])

    def recv_into(self, data: memoryview, size: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        """The bytes of a frame, or what is left of one; raises BlockingIOError if none is here yet."""
        if not self._plain:
            length = self._await_frame()
            if length < 0:
                return 0
            start, fits = self._start + _HEAD.size, length <= len(data)
            room = numpy.frombuffer(data if fits else bytearray(length), numpy.uint8)
            if not self._decrypt.run(room, self._in[start:], length):
                raise ConnectionResetError("a frame was changed on its way")
            self._start = start + length + _TAG
            if fits:
                return length
            self._plain = room.data
        count = min(len(data), len(self._plain))
        data[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    @property
    def has_more(self) -> bool:
        """Whether something can be given out that is no longer in the socket."""
        return bool(self._plain) or self._have >= self._find_end() > 0

    def _await_frame(self) -> int:
        """Read until a whole frame is here; how many bytes it carries, -1 if the other end has closed."""
        if self._start == self._have:  # small messages stay in the first pages
            self._start = self._have = 0
        while self._have < (end := self._find_end()) or not end:
            if self._start and max(end + _HEAD.size, self._have + _AHEAD) > len(self._in):
                rest = self._in[self._start : self._have].copy()
                self._start, self._have = 0, len(rest)
                self._in[: len(rest)] = rest
                continue
            stop = end + _HEAD.size if end else self._have + _AHEAD  # with the length of the next one
            count = super().recv_into(self._in[self._have : stop].data)
            if not count:
                return -1
            self._have += count
        return end - _TAG - _HEAD.size - self._start

    def _find_end(self) -> int:
        """Where the next frame ends; 0 if its length is not here yet."""
        if self._have - self._start < _HEAD.size:
            return 0
        (length,) = _HEAD.unpack_from(self._in.data, self._start)
        if length > _FRAME:
            raise ConnectionResetError(f"a frame of {length} bytes was announced")
        return int(self._start + _HEAD.size + length + _TAG)


@functools.cache
def measure_speed() -> float:
    """Bytes that a core of this machine encrypts, or decrypts, in a second, with all that is around it here."""
    ends: list[socket.socket] = list(make_pair())
    if key := draw_key(ends[0]):
        ends = [seal(end, key, connected=end is ends[0]) for end in ends]
    data, best = memoryview(bytearray(_MEASURED)), float("inf")
    for _ in range(_TRIALS):
        began, left = time.perf_counter(), ends[0].send(data)
        moved = 2 * left
        while left:
            left -= ends[1].recv_into(data)
        best = min(best, (time.perf_counter() - began) / moved)
    for end in ends:
        end.close()
    return 1 / best


def draw_key(sock: socket.socket) -> str:
    """A new key for a connection, to be told to the other end; empty if that has to stay as it is."""
    key = secrets.token_hex(2 * _KEY)
    return key if can_seal(sock, key) else ""


def can_seal(sock: socket.socket, key: object) -> bool:
    """Whether a connection can go on with frames under a key that its other end has told: it is encrypted by TLS, and
    both ends have libcrypto."""
    is_key = isinstance(key, str) and re.fullmatch("[0-9a-f]*", key) is not None and len(key) == 4 * _KEY
    return is_key and bool(getattr(sock, "binding", b"")) and is_available()


def seal(sock: socket.socket, key: str, *, connected: bool) -> Sealed:
    """Go on with frames; `connected`: whether this end made the connection."""
    first, second = bytes.fromhex(key)[:_KEY], bytes.fromhex(key)[_KEY:]
    return Sealed(sock, first, second) if connected else Sealed(sock, second, first)

"""A connection of the control plane: TCP, where both ends prove that they know a token.

Launchers speak so to their workers on other hosts, and workers to the store in which they meet.

1. Greeting: each end sends a nonce and a code (HMAC-SHA256 with the token) over both nonces. What has not been proven
   is of fixed length and is never parsed.
2. Frames: a kind of one byte, a length, a code over the frame's number and contents, then the contents. The keys come
   from the token and the nonces, so nothing can be put in, left out, or played back.

It authenticates and does not encrypt: like the engines' own traffic, it is for networks that nobody else listens on.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from unisono.launchers.runtime.secret import derive_secret

__all__ = [
    "GREETING_S",
    "MOST_UNPROVEN",
    "Channel",
    "Frame",
    "NotProven",
    "Unreachable",
    "connect",
    "connect_once",
    "keep_alive",
]

GREETING_S = 10.0  # that an end has to prove itself
MOST_UNPROVEN = 256  # connections at a time; a stranger that opens more drives out other strangers
_MAGIC = b"unisono channel 1\n"
_NONCE, _CODE = 32, 32
_HEAD = struct.Struct("<cI32s")  # kind, length, code
PIECE_BYTES = 1 << 20  # longer contents travel in pieces: no frame is longer


class NotProven(ConnectionError):
    """The other end does not know the token, or is something else altogether."""


class Unreachable(ConnectionError):
    """No address of the launcher could be reached; the text says which were tried and how each failed."""


class Frame(NamedTuple):
    """`kind` is one letter, "J" for JSON."""

    kind: str
    body: bytes

    def json(self) -> dict[str, Any]:
        """The contents of a frame of kind "J"; NotProven if it is no JSON object."""
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise NotProven(f"expected a JSON object: {error}") from None
        if not isinstance(value, dict):
            raise NotProven(f"expected a JSON object, got {type(value).__name__}")
        return value


class Channel:
    """One end. The launcher's is not blocking: `receive` and `flush` do what can be done now."""

    def __init__(self, sock: socket.socket, token: bytes, *, server: bool) -> None:
        self.sock = sock
        self.proven = False
        self.since = time.monotonic()
        self.caller = _name_caller(sock)  # "10.0.0.7:51234"
        self._token, self._server = token, server
        self._nonce = secrets.token_bytes(_NONCE)
        self._in, self._out = bytearray(), bytearray()
        self._sent = self._received = 0
        self._send_key = self._receive_key = b""
        if server:
            self._out += _MAGIC + self._nonce

    def fileno(self) -> int:
        """The socket's descriptor, for event loops."""
        return self.sock.fileno()

    @property
    def bytes_to_send(self) -> int:
        """How many queued bytes have not been sent yet."""
        return len(self._out)

    def send(self, kind: str, body: bytes) -> None:
        """Queue a frame, in pieces if it is long, and send what can be sent now."""
        for start in range(0, max(1, len(body)), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            letter = kind.encode()
            code = self._code(self._send_key, self._sent, letter, piece)
            self._sent += 1
            self._out += _HEAD.pack(letter, len(piece), code) + piece
        self.flush()

    def send_json(self, **fields: Any) -> None:
        """Queue a frame of kind "J"."""
        self.send("J", json.dumps(fields).encode())

    def flush(self) -> None:
        """Send what is queued: all of it on a blocking socket, what fits on another."""
        while self._out:
            try:
                done = self.sock.send(self._out)
            except BlockingIOError:
                return
            del self._out[:done]

    def receive(self) -> list[Frame] | None:
        """The frames that are complete now; None when the other end has closed."""
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._in += data
        if not self.proven and not self._greet():
            return []
        return list(self._frames())

    def take_rest(self) -> bytes:
        """What has come behind the frames so far, if the connection has another use from now on."""
        rest, self._in = bytes(self._in), bytearray()
        return rest

    def derive_secret(self, purpose: str) -> bytes:
        """A secret that both ends know, and that tells nothing of the token."""
        return derive_secret(self._token, purpose)

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()

    # -- 1. greeting ---------------------------------------------------------------------------------------------------

    def _greet(self) -> bool:
        """One step of the greeting; True when both ends are proven."""
        if self._server:
            wanted = _NONCE + _CODE
            if len(self._in) < wanted:
                return False
            theirs, code = bytes(self._in[:_NONCE]), bytes(self._in[_NONCE:wanted])
            del self._in[:wanted]
            self._compare(code, b"worker", self._nonce + theirs)
            self._out += self._sign(b"launcher", self._nonce + theirs)
            self._settle(self._nonce + theirs)
            self.flush()
            return True
        if not self._received:  # the launcher's nonce has not been answered
            wanted = len(_MAGIC) + _NONCE
            if len(self._in) < wanted:
                self._check_magic(bytes(self._in[: len(_MAGIC)]))
                return False
            self._check_magic(bytes(self._in[: len(_MAGIC)]))
            self._both = bytes(self._in[len(_MAGIC) : wanted]) + self._nonce
            del self._in[:wanted]
            self._out += self._nonce + self._sign(b"worker", self._both)
            self._received = 1
            self.flush()
        if len(self._in) < _CODE:
            return False
        code = bytes(self._in[:_CODE])
        del self._in[:_CODE]
        self._compare(code, b"launcher", self._both)
        self._settle(self._both)
        return True

    def _check_magic(self, begin: bytes) -> None:
        if not _MAGIC.startswith(begin):
            raise NotProven("something else listens there")

    def _compare(self, code: bytes, who: bytes, nonces: bytes) -> None:
        if not hmac.compare_digest(code, self._sign(who, nonces)):
            raise NotProven("the other end does not know this run's token")

    def _settle(self, nonces: bytes) -> None:
        keys = [self._sign(way, nonces) for way in (b"to worker", b"to launcher")]
        self._send_key, self._receive_key = keys if self._server else keys[::-1]
        self._sent = self._received = 0
        self.proven = True

    def _sign(self, what: bytes, nonces: bytes) -> bytes:
        binding = getattr(self.sock, "binding", b"")  # of an encrypted connection: whoever stands between has two
        return hmac.digest(self._token, what + nonces + binding, hashlib.sha256)

    # -- 2. frames -----------------------------------------------------------------------------------------------------

    def _frames(self) -> Iterator[Frame]:
        while len(self._in) >= _HEAD.size:
            letter, length, code = _HEAD.unpack_from(self._in)
            if length > PIECE_BYTES:
                raise NotProven(f"a frame of {length} bytes")
            if len(self._in) < _HEAD.size + length:
                return
            body = bytes(self._in[_HEAD.size : _HEAD.size + length])
            del self._in[: _HEAD.size + length]
            if not hmac.compare_digest(code, self._code(self._receive_key, self._received, letter, body)):
                raise NotProven("a frame was changed on its way")
            self._received += 1
            yield Frame(letter.decode("latin-1"), body)

    @staticmethod
    def _code(key: bytes, number: int, letter: bytes, body: bytes) -> bytes:
        mac = hmac.new(key, struct.pack("<Qc", number, letter), hashlib.sha256)
        mac.update(body)
        return mac.digest()


def _name_caller(sock: socket.socket) -> str:
    try:
        return ":".join(map(str, sock.getpeername()[:2]))
    except OSError:
        return "an address that is not known any more"


def keep_alive(sock: socket.socket) -> None:
    """Send small things at once, and notice within half a minute when the other host is gone or cut off."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(addresses: Sequence[tuple[str, int]], token: bytes, *, timeout_s: float = 20.0) -> Channel:
    """A proven channel to the first of the launcher's addresses that answers; Unreachable if none does."""
    deadline = time.monotonic() + timeout_s
    tried: dict[str, str] = {}
    while True:
        for host, port in addresses:
            left_s = max(1.0, deadline - time.monotonic())
            try:
                return connect_once(host, port, token, timeout_s=min(3.0, left_s))
            except OSError as error:
                tried[f"{host}:{port}"] = str(error) or type(error).__name__
        if time.monotonic() > deadline or not addresses:
            attempts = "; ".join(f"{where} ({why})" for where, why in tried.items()) or "no address"
            raise Unreachable(f"host {socket.gethostname()} cannot reach the launcher. Tried: {attempts}")
        time.sleep(0.2)


def connect_once(
    host: str,
    port: int,
    token: bytes,
    *,
    timeout_s: float,
    wrap: Callable[[socket.socket], socket.socket] | None = None,
) -> Channel:
    """A proven channel to an address; NotProven if what listens there does not know the token.

    `wrap`: puts another layer, such as encryption, around the connection before anything is said.
    """
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        keep_alive(sock)
        sock = sock if wrap is None else wrap(sock)
        channel = Channel(sock, token, server=False)
        deadline = time.monotonic() + timeout_s
        while not channel.proven:
            sock.settimeout(max(0.001, deadline - time.monotonic()))  # whoever listens there may send byte by byte
            if channel.receive() is None:
                raise NotProven("it closed the connection: another run's, or another service")
        sock.settimeout(None)
        return channel
    except BaseException:
        sock.close()
        raise

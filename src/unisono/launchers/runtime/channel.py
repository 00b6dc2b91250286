"""A connection of the control plane: TCP, both of whose ends prove that they know a token; and a run's secret.

Launchers speak so to their workers on other hosts, and workers to the store in which they meet.

1. Line: whoever listens says whether the connection is to be encrypted. Then TLS begins (encryption.py), and all that
   follows is inside it. Nobody gains by changing the line: the proof is made over the handshake, or over none.
2. Greeting: each end sends a nonce and a code (HMAC-SHA256 with the token) over both nonces and TLS's handshake. What
   has not been proven is of fixed length and is never parsed.
3. Frames: a kind of one byte, a length, a code over the frame's number and contents, then the contents. The keys come
   from the token and the nonces, so nothing can be put in, left out, or played back.

A ChannelServer has the channels that others open at one address. What strangers can use up is limited: connections that
have not proven themselves, the time that they have for it, and bytes of answers that nobody takes.

A run's secret opens its store. The launcher makes it, or the user gives it if there is no launcher of ours. It travels
in the environment of the workers, which only their user can read, and never on a command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from unisono.launchers.runtime.local_channel import EventLoop

__all__ = [
    "GREETING_S",
    "MOST_UNPROVEN",
    "SECRET",
    "STORE",
    "Channel",
    "ChannelServer",
    "Frame",
    "NotProven",
    "Unreachable",
    "connect",
    "connect_once",
    "derive_secret",
    "keep_alive",
    "read_store_secret",
]

GREETING_S = 10.0  # that an end has to prove itself
MOST_UNPROVEN = 256  # connections at a time; a stranger that opens more drives out other strangers
_MAGIC = b"unisono channel 1\n"
_SEALED = b"unisono channel 1 tls\n"  # TLS follows, and what _MAGIC announces inside it
_NONCE, _CODE = 32, 32
_HEAD = struct.Struct("<cI32s")  # kind, length, code
_CLOSED = "it closed the connection: another run's, or another service"
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

    def __init__(self, sock: socket.socket, token: bytes, *, server: bool, heard: bytes = b"") -> None:
        """`heard`: what has been read of the connection already."""
        self.sock = sock
        self.proven = False
        self.since = time.monotonic()
        self.caller = _name_caller(sock)  # "10.0.0.7:51234"
        self._token, self._server = token, server
        self._nonce = secrets.token_bytes(_NONCE)
        self._in, self._out = bytearray(heard), bytearray()
        self._sent = self._received = 0
        self._send_key = self._receive_key = b""
        if server:
            self._out += _MAGIC + self._nonce

    def fileno(self) -> int:
        """The socket's descriptor, for event loops."""
        return self.sock.fileno()

    @property
    def is_encrypted(self) -> bool:
        """Whether nobody else can read what passes here."""
        return hasattr(self.sock, "binding")

    @property
    def can_send_more(self) -> bool:
        """Whether something is queued that waits for room, and not for the other end to shake hands."""
        return bool(self._out) and bool(getattr(self.sock, "is_ready", True))

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

    # -- 2. greeting ---------------------------------------------------------------------------------------------------

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
            _check_line(self._in[: len(_MAGIC)], _MAGIC)
            if len(self._in) < wanted:
                return False
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

    # -- 3. frames -----------------------------------------------------------------------------------------------------

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


def _check_line(begin: bytes | bytearray, *known: bytes) -> None:
    """Raise NotProven unless one of these lines may begin like that."""
    if not any(line.startswith(begin[: len(line)]) for line in known):
        ours = begin.startswith(b"unisono channel ")
        raise NotProven("another version of unisono listens there" if ours else "something else listens there")


def _name_caller(sock: socket.socket) -> str:
    try:
        return ":".join(map(str, sock.getpeername()[:2])).removeprefix("::ffff:")  # IPv4, at a socket for both
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


def connect_once(host: str, port: int, token: bytes, *, timeout_s: float) -> Channel:
    """A proven channel to an address, encrypted if whoever listens there says so; NotProven if that does not know the
    token."""
    sock = socket.create_connection((host, port), timeout=timeout_s)
    try:
        keep_alive(sock)
        deadline = time.monotonic() + timeout_s

        line = _read_line(sock, deadline)
        if line == _SEALED:
            from unisono.launchers.runtime.encryption import wrap_client

            sock, line = wrap_client(sock), b""
        channel = Channel(sock, token, server=False, heard=line)
        while not channel.proven:
            sock.settimeout(max(0.001, deadline - time.monotonic()))  # whoever listens there may send byte by byte
            if channel.receive() is None:
                raise NotProven(_CLOSED)
        sock.settimeout(None)
        return channel
    except BaseException:
        sock.close()
        raise


def _read_line(sock: socket.socket, deadline: float) -> bytes:
    """What whoever listens says first: _SEALED, or _MAGIC and perhaps a part of what follows."""
    heard = b""
    while len(heard) < len(_MAGIC) or (_SEALED.startswith(heard) and heard != _SEALED):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        data = sock.recv(len(_SEALED) - len(heard))
        heard += data
        if not data:
            raise NotProven(_CLOSED)
        _check_line(heard, _MAGIC, _SEALED)
    return heard


# The secret of a run -------------------------------------------------------------------------------------------------


SECRET = "UNISONO_SECRET"
STORE = "UNISONO_STORE"  # the address of the launcher's store, which the launcher's secret opens
_FEWEST_CHARACTERS = 16


def derive_secret(secret: bytes, purpose: str) -> bytes:
    """Derive a secret for one purpose, from which the first cannot be found."""
    return hmac.digest(secret, b"unisono " + purpose.encode(), hashlib.sha256)


def read_store_secret(host: str, port: int, *, hosted: bool, env: Mapping[str, str] = os.environ) -> bytes | None:
    """What opens the store at an address; None for one that asks for no secret.

    `hosted`: whether whoever started the workers keeps the store. That is our launcher, or torchrun, whose store knows
    no secret.
    """
    text = env.get(SECRET, "")
    if not text or (hosted and env.get(STORE) != f"{host}:{port}"):
        return None
    if len(text) < _FEWEST_CHARACTERS:
        raise ValueError(
            f"{SECRET} has {len(text)} characters; expected at least {_FEWEST_CHARACTERS}, the same on every worker, "
            "such as `openssl rand -hex 32` prints"
        )
    return derive_secret(text.encode(), "store")


# Many channels at one address ----------------------------------------------------------------------------------------


_MOST_NAMED = 5  # strangers that are told of
_NO_DESCRIPTORS_S = 0.05  # until accepting is tried again


class ChannelServer:
    """Serves from `start` on; connections made before are served then.

    listener: where others connect; there may be several.
    on_frames: given a channel and what it has said; NotProven or another ConnectionError drops the channel.
    on_lost: given a channel whose other end is gone, or is not one of ours. It is closed already.
    most_unread: bytes that a channel may leave unread; more drops it. None: no limit.
    is_encrypted: whether nobody else can read the channels.
    name: of the address, "the store": the first strangers who say something there are named on standard error.
    """

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket | Sequence[socket.socket],
        token: bytes,
        on_frames: Callable[[Channel, list[Frame]], None],
        on_lost: Callable[[Channel], None],
        *,
        most_unread: int | None = None,
        is_encrypted: bool = False,
        name: str = "",
    ) -> None:
        self._name, self._strangers = name, 0
        self._listeners = [listener] if isinstance(listener, socket.socket) else list(listener)
        self._loop, self._token, self.is_encrypted = loop, token, is_encrypted
        self._on_frames, self._on_lost, self._most_unread = on_frames, on_lost, most_unread
        self.channels: dict[Channel, None] = {}  # the oldest first
        self._unproven: dict[Channel, None] = {}
        for each in self._listeners:
            each.setblocking(False)
        if is_encrypted:
            from unisono.launchers.runtime.encryption import wrap_server

            self._wrap = wrap_server

    def start(self) -> None:
        """Accept connections."""
        for listener in self._listeners:
            self._loop.watch(listener, partial(self._accept, listener))

    def close_address(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            self._loop.forget(listener)
            listener.close()

    def close(self) -> None:
        """Close the address and all channels; `on_lost` is not called."""
        self.close_address()
        for channel in list(self.channels):
            self.forget(channel)

    def drop_late(self) -> float | None:
        """Drop channels that have not proven themselves in time; seconds until the next is due, None if there is none.

        To be called each time after `pump`.
        """
        now = time.monotonic()
        for channel in list(self._unproven):
            if (left_s := channel.since + GREETING_S - now) > 0:
                return left_s
            self.name_stranger(channel)
            self._lose(channel)
        return None

    def send(self, channel: Channel, **fields: Any) -> None:
        """Send a JSON object; to a channel that is gone, nothing."""
        self.send_frame(channel, "J", json.dumps(fields).encode())

    def send_frame(self, channel: Channel, kind: str, body: bytes) -> None:
        """Send a frame; to a channel that is gone, nothing."""
        if channel in self.channels:
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                channel.send(kind, body)
            self.flush(channel)

    def flush(self, channel: Channel) -> None:
        """Send what can be sent now, and the rest when it can."""
        if channel not in self.channels:
            return
        with contextlib.suppress(OSError):  # its end is noticed when it is read
            channel.flush()
        if self._most_unread is not None and channel.bytes_to_send > self._most_unread:
            self._lose(channel)
        else:
            self._loop.watch_writing(channel, channel.can_send_more)

    def forget(self, channel: Channel) -> None:
        """Close a channel; `on_lost` is not called."""
        if channel in self.channels:
            self.release(channel)
            channel.close()

    def release(self, channel: Channel) -> None:
        """Serve a channel no more, and leave it open: its socket has another use from now on."""
        self._loop.forget(channel)
        del self.channels[channel]
        self._unproven.pop(channel, None)

    def name_stranger(self, channel: Channel, why: str = "it did not prove that it knows this run's secret") -> None:
        """Say who was refused, and why; not of everyone, as there may be many."""
        self._strangers += 1
        if self._name and self._strangers <= _MOST_NAMED:
            text = f"a connection from {channel.caller} to {self._name} was refused: {why}"
            print(f"unisono: {text}", file=sys.stderr, flush=True)

    def _lose(self, channel: Channel) -> None:
        self.forget(channel)
        self._on_lost(channel)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors are left, or the caller has gone
            if self._unproven:
                self._lose(next(iter(self._unproven)))
            else:
                time.sleep(_NO_DESCRIPTORS_S)
            return
        sock.setblocking(False)
        try:
            keep_alive(sock)
            if self.is_encrypted:
                sock.send(_SEALED)
                sock = self._wrap(sock)
        except OSError:  # the caller has gone
            sock.close()
            return
        channel = Channel(sock, self._token, server=True)
        self.channels[channel] = self._unproven[channel] = None
        self._loop.watch(channel, partial(self._read, channel))
        self.flush(channel)
        if len(self._unproven) > MOST_UNPROVEN:
            self._lose(next(iter(self._unproven)))

    def _read(self, channel: Channel) -> None:
        try:
            channel.flush()
            frames = channel.receive()
        except OSError as error:
            frames = None
            if not channel.proven and not isinstance(
                error, (ConnectionResetError, BrokenPipeError)
            ):  # it has only left
                self.name_stranger(channel)
        if frames is None:
            self._lose(channel)
            return
        if channel.proven:
            self._unproven.pop(channel, None)
        try:
            if frames:
                self._on_frames(channel, frames)
        except ConnectionError:  # what was said is no message of ours
            if channel in self.channels:
                self._lose(channel)
            return
        self.flush(channel)

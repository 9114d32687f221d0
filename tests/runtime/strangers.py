"""Raw sockets that speak to an FFN server, or in its place, as they like."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

from afdpatch.runtime.protocol import HEADER_BYTES, Header, Kind, Layout, decode_answer
from afdpatch.runtime.secret import Handshake

from .helpers import HIDDEN, greeting

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memfd(layout: Layout, seals: int = SEALS, size: int | None = None) -> int:
    fd = os.memfd_create("afdpatch-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.total_bytes if size is None else size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def framed(address: Any, text: bytes) -> bytes:
    """A message of text as it goes over the address's transport."""
    return text if isinstance(address, str) else struct.pack("<4sI", b"AFDt", len(text)) + text


def unframed(address: Any, message: bytes) -> bytes:
    return message if isinstance(address, str) else message[8:]


def stranger(address: Any, *messages: bytes, fds: Any = ()) -> socket.socket:
    """A raw client of the same user; sends the first message with the descriptors, then the others, as they are."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if isinstance(address, str) else socket.socket()
    sock.settimeout(20)
    sock.connect(address)
    for number, message in enumerate(messages):
        socket.send_fds(sock, [message], list(fds) if number == 0 else [])
    return sock


def challenged(address: Any, secret: bytes | None = None) -> tuple[socket.socket, Handshake]:
    """A stranger that has had its challenge."""
    handshake = Handshake("attention", secret)
    sock = stranger(address, framed(address, handshake.hello()))
    assert handshake.check_challenge(unframed(address, sock.recv(65536))) is None
    return sock, handshake


def raw_peer(address: Any, *messages: bytes, **changes: Any) -> socket.socket:
    """A stranger that greets as it should, then sends what it likes."""
    ours = greeting("attention", **changes)
    sock, handshake = challenged(address)
    fds = [memfd(Layout.of(ours))] if isinstance(address, str) else []
    socket.send_fds(sock, [framed(address, handshake.seal(ours.encode()))], fds)
    for fd in fds:
        os.close(fd)
    answer = decode_answer(handshake.open(unframed(address, sock.recv(65536))))
    assert getattr(answer, "role", "") == "ffn"
    for message in messages:
        sock.send(message)
    return sock


def good_hop(address: Any, **changes: Any) -> bytes:
    """A whole hop of one row in the first micro-batch, with its payload where there is one."""
    header = Header(Kind.HOP, 3, 1, 0, 0, 0, 1, HIDDEN, 0, HIDDEN * 4)._replace(**changes)
    return header.pack() + (b"" if isinstance(address, str) else bytes(header.nbytes))


@contextlib.contextmanager
def impostor(address: Any) -> Iterator[tuple[Any, Any, Any]]:
    """An FFN server's place: functions that take and greet a peer, read its hop's header, and write a message."""
    if isinstance(address, str):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    else:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.settimeout(20)
    listener.bind(address)
    listener.listen()
    taken: list[socket.socket] = []

    def take() -> socket.socket:
        sock, _ = listener.accept()
        taken.append(sock)
        sock.settimeout(20)
        handshake = Handshake("ffn", None)
        sock.send(framed(address, handshake.challenge(unframed(address, sock.recv(65536)))))
        handshake.open(unframed(address, sock.recv(65536)))
        own = greeting("ffn", state="serving").encode()
        sock.send(framed(address, handshake.seal(own)))
        return sock

    def read(sock: socket.socket) -> bytes:
        return sock.recv(HEADER_BYTES)

    def write(sock: socket.socket, message: bytes) -> None:
        sock.send(message)

    try:
        yield take, read, write
    finally:
        for sock in (listener, *taken):
            sock.close()

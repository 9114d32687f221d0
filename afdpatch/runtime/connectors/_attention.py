"""The attention side of every connector over a socket: greeting, checks, deadlines, loss."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from afdpatch.runtime.connectors.base import (
    AttentionConnector,
    ConnectionRefused,
    ConnectTimeout,
    FfnError,
    GreetingMismatch,
    HopTimeout,
    InvalidHop,
    PeerLost,
    Unreachable,
)
from afdpatch.runtime.protocol import (
    DTYPE_CODES,
    HEADER_BYTES,
    MAX_ERROR_BYTES,
    Greeting,
    Header,
    Kind,
    Layout,
    Mismatch,
    ProtocolError,
    Refusal,
    advice,
    compare,
    control,
    decode_answer,
)
from afdpatch.runtime.secret import Handshake, SecretError

_ERROR = int(Kind.ERROR)
_CPU = torch.device("cpu")
_KIND_AT = 6  # of the byte in the header
_PING = control(Kind.PING)
_AT_ONCE = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT


class SocketAttentionConnector(AttentionConnector):
    """What the transports share; each of them opens the socket, carries text, and moves the payload.

    Args:
        where: the address, as messages name it.
        secret: shared with the FFN server, or None.
        spin_us: how long to look for an answer before sleeping, in microseconds.
    """

    _read: Callable[[], int]
    """Length of the next whole message, which lies in ``_in``; 0 when the peer closed.
    Raises BlockingIOError while there is none."""

    def __init__(self, where: str, *, secret: bytes | None = None, spin_us: int = 50) -> None:
        self._where = where
        self._secret = secret
        self._spin_ns = spin_us * 1000
        # Reentrant: a signal handler may close() the connector whose hop it interrupts.
        self._lock = threading.RLock()
        self._close_lock = threading.RLock()
        self._closing = False
        self._close_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sock: socket.socket | None = None
        self._poll = select.poll()
        self._serving = False
        self._asked_ns = 0  # when the PING was sent that has no answer yet
        self._why_lost = "not connected yet"
        self._out = bytearray(HEADER_BYTES)
        self._expected = bytearray(HEADER_BYTES)
        # One byte more than any message may have, so that a longer one shows.
        self._in = bytearray(HEADER_BYTES + MAX_ERROR_BYTES + 1)

    # What a transport adds

    @abstractmethod
    def _open(self, deadline_s: float) -> socket.socket:
        """A connected socket that doesn't block. Raises OSError, Unreachable or ConnectionRefused."""

    @abstractmethod
    def _say(self, sock: socket.socket, text: bytes, deadline_s: float) -> None:
        """Send one message of text. Raises OSError."""

    @abstractmethod
    def _hear(self, sock: socket.socket, deadline_s: float) -> bytes:
        """Receive one message of text; empty when the peer closed. Raises OSError or ProtocolError."""

    @abstractmethod
    def _greet(self, sock: socket.socket, greeting: Greeting, sealed: bytes, deadline_s: float) -> None:
        """Send the greeting with whatever goes with it, and make the buffers."""

    @abstractmethod
    def _exchange(
        self, hidden: Tensor, out: Tensor, layer: int, micro_batch: int, sequence: int, step: int, deadline_ns: int
    ) -> None:
        """Send a hop, wait with ``_message``, and put the result into ``out``; ``_expected`` is the reply's header.

        Raises:
            _Late: past the deadline; OSError, EOFError, ProtocolError: the peer has gone; what ``_unexpected`` raises.
        """

    @abstractmethod
    def _error_text(self, header: Header, length: int, deadline_ns: int) -> str:
        """The text of the ERROR whose first ``length`` bytes lie in ``_in``."""

    def _release(self) -> None:
        """Give back what ``_greet`` made."""

    # Connecting

    @property
    def where(self) -> str:
        return self._where

    def connect(self, greeting: Greeting, deadline_s: float) -> Greeting:
        with self._lock:
            if self._sock is not None:
                raise RuntimeError(f"{self._where}: connected before; a new connection needs a new connector")
            started = time.monotonic()
            sock = None
            try:
                self._check_open()
                sock = self._open(deadline_s)
                theirs = self._shake_hands(sock, greeting, deadline_s)
                self._watch(self._poll, sock, select.POLLIN)
            except BaseException as error:
                if sock is not None:
                    sock.close()
                self._drop("its greeting failed")
                if isinstance(error, (TimeoutError, BlockingIOError)):
                    took = time.monotonic() - started
                    raise Unreachable(f"the FFN server at {self._where} did not answer within {took:.1f} s") from error
                if isinstance(error, (OSError, EOFError)):
                    raise Unreachable(f"no FFN server answered at {self._where} ({error})") from error
                raise
            self._sock = sock
            self._layers = frozenset(greeting.layers)
            self._layout = Layout.of(greeting)
            self._dtype: torch.dtype = getattr(torch, greeting.dtype)
            self._code = DTYPE_CODES[greeting.dtype]
            self._serving = theirs.state == "serving"
            if self._closing:  # in a signal handler
                self._drop("closed")
                raise self._closed_meanwhile()
            return theirs

    def _shake_hands(self, sock: socket.socket, greeting: Greeting, deadline_s: float) -> Greeting:
        where = f"the FFN server at {self._where}"
        handshake = Handshake("attention", self._secret)
        try:
            # Who refuses at once has closed by now, and its reason is still to be read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._say(sock, handshake.hello(), deadline_s)
            refusal = handshake.check_challenge(self._answer(sock, deadline_s))
            if refusal is not None:
                self._refused(handshake.believed(refusal))
            self._greet(sock, greeting, handshake.seal(greeting.encode()), deadline_s)
            message = self._answer(sock, deadline_s)
            answer = decode_answer(message.partition(b"\n")[0])
            if isinstance(answer, Refusal):
                self._refused(answer)
            handshake.open(message)
        except SecretError as error:
            with contextlib.suppress(OSError):
                self._say(sock, Refusal(str(error)).encode(), deadline_s)
            raise ConnectionRefused(f"{where} is not taken: {error}") from error
        except ProtocolError as error:
            if error.other_version:
                self._mismatched(error.other_version)
            raise ConnectionRefused(
                f"{where} gave no greeting: {error.plain}; another program has this address"
            ) from error
        found = compare(greeting, answer)
        if found:
            self._mismatched(found)
        return answer

    def _answer(self, sock: socket.socket, deadline_s: float) -> bytes:
        message = self._hear(sock, deadline_s)
        if not message:
            raise EOFError("it closed the connection during the greeting")
        return message

    def _refused(self, refusal: Refusal) -> NoReturn:
        if refusal.mismatches:
            # The FFN's own value comes first in its refusal.
            self._mismatched([Mismatch(field, ours=theirs, theirs=own) for field, own, theirs in refusal.mismatches])
        raise ConnectionRefused(
            f"the FFN server at {self._where} refused this server: {refusal.reason}", retry=refusal.retry
        )

    def _mismatched(self, found: Sequence[Mismatch]) -> NoReturn:
        listed = "; ".join(map(str, found))
        raise GreetingMismatch(
            f"the FFN server at {self._where} doesn't fit this attention server: {listed}; {advice(found)}",
            found,
        )

    def _wait(self, sock: socket.socket, events: int, deadline_s: float) -> None:
        """Until the socket has one of the events. Raises TimeoutError, or PeerLost when this connector is closed."""
        poll = select.poll()
        self._watch(poll, sock, events)
        left_ms = math.ceil((deadline_s - time.monotonic()) * 1000)
        if left_ms <= 0 or not poll.poll(left_ms):
            raise TimeoutError("no answer in time")
        self._check_open()

    def _watch(self, poll: select.poll, sock: socket.socket, events: int) -> None:
        """Let a poll look at the socket, and at the end of this connector. Raises PeerLost: it is closed."""
        try:
            poll.register(sock, events)
            poll.register(self._close_fd, select.POLLIN)
        except ValueError:  # no descriptor any more: close(), in a signal handler
            raise self._closed_meanwhile() from None

    def _check_open(self) -> None:
        if self._closing:
            raise self._closed_meanwhile()

    def _closed_meanwhile(self) -> PeerLost:
        return PeerLost(f"connection to {self._where}: this connector was closed meanwhile")

    # Hops

    def hop(
        self,
        hidden: Tensor,
        layer: int,
        micro_batch: int = 0,
        *,
        sequence: int,
        step: int,
        deadline_s: float,
        out: Tensor | None = None,
    ) -> Tensor:
        with self._lock:
            self._check(hidden, layer, micro_batch, out)
            if out is None:
                out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
            if not len(hidden):
                return out
            started = time.monotonic_ns()
            try:
                self._exchange(hidden, out, layer, micro_batch, sequence, step, int(deadline_s * 1e9))
                return out
            except FfnError:
                raise
            except BaseException as error:
                # Whatever broke the wait (a signal too) leaves an answer on its way, so the connection has to go.
                self._drop(str(error) or type(error).__name__)
                if isinstance(error, PeerLost) or not isinstance(error, (OSError, EOFError, ProtocolError)):
                    raise
                if self._closing:
                    raise self._closed_meanwhile() from error
                waited = (time.monotonic_ns() - started) / 1e9
                late = isinstance(error, (_Late, TimeoutError))
                what = "did not answer in time" if late else f"has gone or broke the protocol ({error})"
                raise (HopTimeout if late else PeerLost)(
                    f"hop of layer {layer}, sequence {sequence}, at {self._where}: the FFN server {what} after "
                    f"{waited:.3f} s; look at that server's log, restart it if it has ended"
                ) from error

    def _check(self, hidden: Tensor, layer: int, micro_batch: int, out: Tensor | None) -> None:
        if self._sock is None:
            raise PeerLost(f"hop of layer {layer}: no connection to the FFN server at {self._where}: {self._why_lost}")
        self._check_rows(hidden, layer, out, _CPU)
        if layer not in self._layers:
            raise InvalidHop(f"hop of layer {layer}: expected a layer of the greeting: {sorted(self._layers)}")
        if not 0 <= micro_batch < self._layout.micro_batches:
            raise InvalidHop(
                f"hop of layer {layer}: found micro-batch {micro_batch}, expected 0..{self._layout.micro_batches - 1}"
            )

    def _check_rows(self, hidden: Tensor, layer: int, out: Tensor | None, device: torch.device, least: int = 0) -> None:
        """Hold a hop's rows (at least ``least``) and the place for its result against the greeting; or InvalidHop."""
        layout = self._layout
        if hidden.dim() != 2 or hidden.shape[1] != layout.hidden or not least <= hidden.shape[0] <= layout.max_rows:
            raise InvalidHop(
                f"hop of layer {layer}: found shape {list(hidden.shape)}, "
                f"expected [{least}..{layout.max_rows}, {layout.hidden}]"
            )
        if hidden.dtype is not self._dtype or hidden.device != device:
            raise InvalidHop(
                f"hop of layer {layer}: found {hidden.dtype} on {hidden.device}, expected {self._dtype} on {device}"
            )
        if out is not None and (
            out.shape != hidden.shape
            or out.dtype is not hidden.dtype
            or out.device != device
            or not out.is_contiguous()
        ):
            raise InvalidHop(
                f"hop of layer {layer}: out: found {list(out.shape)} {out.dtype} on {out.device}, strides "
                f"{out.stride()}; expected {list(hidden.shape)} {hidden.dtype} on {device}, contiguous"
            )

    def _message(self, deadline_ns: int, spin_ns: int) -> int:
        """Length of the next message, which lies in ``_in``. READY and PONG are taken on the way.

        Raises:
            _Late: past the deadline. EOFError: the peer closed or said goodbye, or this connector is being closed.
        """
        read, now = self._read, time.monotonic_ns
        spin_until_ns = now() + spin_ns
        while True:
            try:
                length = read()
            except BlockingIOError:
                at = now()
                if at >= spin_until_ns:
                    if self._closing:
                        raise EOFError("this connector was closed") from None
                    if at >= deadline_ns:
                        raise _Late("no answer in time") from None
                    self._poll.poll(math.ceil((deadline_ns - at) / 1e6))
                continue
            if not length:
                raise EOFError("connection closed")
            if length == HEADER_BYTES and self._in[_KIND_AT] > _ERROR:
                kind = Header.unpack(self._in).kind
                if kind == Kind.BYE:
                    raise EOFError("it said goodbye")
                if kind in (Kind.READY, Kind.PONG):
                    self._take_quiet(length)
                    continue
            return length

    def _unexpected(self, length: int, layer: int, sequence: int, deadline_ns: int) -> NoReturn:
        """Raise what the message in ``_in`` means, as it isn't the reply that this hop waits for."""
        header = Header.unpack(memoryview(self._in)[:length])
        if header.kind == Kind.ERROR and header.sequence == sequence and length < len(self._in):
            text = self._error_text(header, length, deadline_ns)
            raise FfnError(
                f"hop of layer {layer}, sequence {sequence}: the FFN server at {self._where} failed to compute it: "
                f"{text}; look at that server's log"
            )
        raise PeerLost(
            f"hop of layer {layer}: the FFN server at {self._where} broke the protocol: found "
            f"{Kind(header.kind).name}, {length} bytes, sequence {header.sequence}, layer {header.layer}, "
            f"{header.rows} rows; expected REPLY, sequence {sequence}"
        )

    # Idle

    @property
    def serving(self) -> bool:
        if not self._serving and self._lock.acquire(blocking=False):
            try:
                self._take_ready(0.0)
            except (PeerLost, _Late):
                pass  # lost: there is no socket any more; or not yet
            finally:
                self._lock.release()
        return self._serving and self._sock is not None

    def wait_ready(self, deadline_s: float) -> None:
        started = time.monotonic()
        with self._lock:
            try:
                self._take_ready(deadline_s)
            except _Late:
                raise ConnectTimeout(
                    f"the FFN server at {self._where} is still loading after {time.monotonic() - started:.1f} s; "
                    f"look at its log, or raise connect_timeout_s"
                ) from None

    def _take_ready(self, deadline_s: float) -> None:
        """Wait for READY."""
        if self._sock is None:
            raise PeerLost(f"no connection to the FFN server at {self._where}: {self._why_lost}")
        try:
            while not self._serving:
                self._message_while_loading(int(deadline_s * 1e9))
        except _Late:
            raise
        except (OSError, EOFError, ProtocolError) as error:
            self._drop(str(error))
            raise PeerLost(f"the FFN server at {self._where} ended while it loaded ({error}); see its log") from error

    def _message_while_loading(self, deadline_ns: int) -> None:
        try:
            length = self._read()
        except BlockingIOError:
            if self._closing:
                raise EOFError("this connector was closed") from None
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                raise _Late("still loading") from None
            self._poll.poll(math.ceil(left_ns / 1e6))
            return
        self._take_quiet(length)

    def ping(self, silent_s: float) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._ping(silent_s)
            except BlockingIOError:
                pass  # it reads nothing; the answers that don't come tell
            except (OSError, EOFError, ProtocolError) as error:
                self._drop(str(error))
            finally:
                self._lock.release()

    def _ping(self, silent_s: float) -> None:
        sock = self._sock
        if sock is None:
            return
        # What waits here is read first: this process may have been the one that stood still.
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take_quiet(self._read())
        now = time.monotonic_ns()
        if self._asked_ns and now - self._asked_ns > silent_s * 1e9:
            raise EOFError(f"no sign of life from it for {(now - self._asked_ns) / 1e9:.1f} s")
        self._asked_ns = self._asked_ns or now
        if sock.send(_PING, _AT_ONCE) != len(_PING):
            raise EOFError("it reads nothing")  # half a message would spoil what follows

    def _take_quiet(self, length: int) -> None:
        """Take a message that may come while no hop is out. Raises EOFError for its goodbye or anything else."""
        kind = Header.unpack(memoryview(self._in)[:length]).kind if length else Kind.BYE
        if kind == Kind.PONG:
            self._asked_ns = 0
        elif kind == Kind.READY:
            self._serving = True
        else:
            raise EOFError(f"it sent {Kind(kind).name}" if length else "connection closed")

    def peer_alive(self) -> bool:
        sock = self._sock
        if sock is None:
            return False
        try:
            poll = select.poll()
            poll.register(sock, select.POLLRDHUP)
            return not poll.poll(0)
        except (OSError, ValueError):  # closed by another thread since
            return False

    # The end

    def _drop(self, why: str) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._why_lost = why
            sock.close()
        self._serving = False
        self._release()

    def close(self) -> None:
        # A signal handler's close() may come in the midst of all this: what is given back is taken away first.
        self._closing = True
        with self._close_lock, contextlib.suppress(OSError):
            fd = self._close_fd
            if fd >= 0:
                os.eventfd_write(fd, 1)  # ends the wait of another thread, which then leaves the lock
        with self._lock:
            sock = self._sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.send(control(Kind.BYE), _AT_ONCE)
            self._drop("closed")
            with self._close_lock:
                fd, self._close_fd = self._close_fd, -1
                if fd >= 0:
                    os.close(fd)


class _Late(EOFError):
    """No message by the deadline."""

"""The shared secret: a file's bytes, and the four messages with which two servers prove that both have it.

Attention says hello with a nonce; the FFN answers with a nonce of its own and a proof; the two greetings follow, each
with a proof over itself. A proof is HMAC-SHA256 over both nonces, so one of an earlier connection is worth nothing,
and over who speaks, so that it can't be sent back to its maker. Without a secret the messages are the same and the
proofs are empty. Peers are proved, not what they send later: nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat

from afdpatch.runtime.config import ROLES, ConfigError
from afdpatch.runtime.protocol import (
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    ProtocolError,
    Refusal,
    json_object,
    refusal_of,
)

MIN_BYTES, MAX_BYTES = 16, 4096
MIN_DIFFERENT = 8
"""Least number of different bytes: whoever takes a server's place gets a proof, and may try secrets on it at home."""
MAX_TEXT_BYTES = MAX_GREETING_BYTES + 128
"""The longest message of text: a greeting and its proof."""
ONE_SIDED = "secret_file is set on the {has} server and not on the {lacks} server; set it on both, or on neither"
DIFFER = "the shared secrets of the two servers differ; give both the same secret_file"
DRAINS = "this FFN server is draining; try another, or later"
CROWDED = "too many connections wait for their greeting already; try again later"
UNPROVED = "it gives a reason of its own, and hasn't proved the secret; look at its log"
_OWN_WORDS = frozenset(
    (DIFFER, DRAINS, CROWDED, *(ONE_SIDED.format(has=has, lacks=lacks) for has, lacks in (ROLES, ROLES[::-1])))
)
"""Reasons that are believed of everybody: they say nothing that their sender could choose."""
_NONCE_DIGITS = 64


class SecretError(Exception):
    """The other side has another secret, or one side has none."""


def read_secret(path: str | None) -> bytes | None:
    """The secret in a file; None without a path.

    Raises:
        ConfigError: no such file, not a plain file, readable by others, of a size out of 16..4096 bytes, or with less
        than eight different bytes.
    """
    if path is None:
        return None
    key = "connector_extra_config.secret_file"
    try:
        # Without O_NONBLOCK a FIFO would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            key, f"{path}: {error.strerror}", f"needed: a file of {MIN_BYTES} to {MAX_BYTES} bytes"
        ) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(key, f"{path}, which is not a plain file", "needed: a plain file")
        if found.st_mode & 0o077:
            raise ConfigError(
                key, f"{path} with mode {stat.S_IMODE(found.st_mode):04o}", f"others must not read it: chmod 600 {path}"
            )
        data = os.read(fd, MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(key, f"{path}: {error.strerror}", "needed: a plain file") from None
    finally:
        os.close(fd)
    if not MIN_BYTES <= len(data) <= MAX_BYTES:
        size = f"{len(data)} bytes" if len(data) <= MAX_BYTES else f"more than {MAX_BYTES} bytes"
        raise ConfigError(key, f"{path} with {size}", f"needed: {MIN_BYTES} to {MAX_BYTES} bytes")
    if len(set(data)) < MIN_DIFFERENT:
        raise ConfigError(
            key,
            f"{path} with {len(set(data))} different bytes",
            f"needed: at least {MIN_DIFFERENT}, so that nobody guesses it: head -c 32 /dev/urandom > {path}",
        )
    return data


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5


class Handshake:
    """One side of one connection's four messages.

    Args:
        role: of this side, ``attention`` or ``ffn``.
        secret: the shared one; None for none.
    """

    def __init__(self, role: str, secret: bytes | None) -> None:
        self._role = role
        self._other = "ffn" if role == "attention" else "attention"
        self._secret = secret
        self._nonce = secrets.token_hex(_NONCE_DIGITS // 2)
        self._nonces = ""
        self.proved = secret is None
        """Whether the other side has proved the secret; without one, everybody has."""

    def hello(self) -> bytes:
        """Attention's first message."""
        return self._message("hello")

    def challenge(self, hello: bytes) -> bytes:
        """The FFN's answer to a hello.

        Raises:
            ProtocolError: not a hello. SecretError: one side has no secret.
        """
        theirs = self._read("hello", json_object(hello))
        self._nonces = theirs + self._nonce
        return self._message("challenge", self._proof(self._role, b""))

    def check_challenge(self, message: bytes) -> Refusal | None:
        """Attention's look at the FFN's answer: None when all is well, or the refusal that came in its place.

        Raises:
            ProtocolError: not a challenge. SecretError: another secret, or one side has none.
        """
        data = json_object(message)
        refusal = refusal_of(data)
        if refusal is None:
            theirs = self._read("challenge", data)
            self._nonces = self._nonce + theirs
            self._verify(self._other, b"", data.get("proof"))
        return refusal

    def believed(self, refusal: Refusal) -> Refusal:
        """A refusal of the other side as it may be shown: who hasn't proved the secret has no words of its own."""
        if self.proved:
            return refusal
        reason = refusal.reason if refusal.reason in _OWN_WORDS else UNPROVED
        versions = (mismatch for mismatch in refusal.mismatches if mismatch.field == "protocol")
        numbers = tuple(
            mismatch for mismatch in versions if _is_version(mismatch.ours) and _is_version(mismatch.theirs)
        )
        return Refusal(reason, numbers, refusal.retry)

    def seal(self, message: bytes) -> bytes:
        """A greeting of this side with its proof behind it."""
        return message + b"\n" + self._proof(self._role, message).encode()

    def open(self, sealed: bytes) -> bytes:
        """The other side's greeting without its proof, which is right.

        Raises:
            ProtocolError: no proof. SecretError: a wrong one.
        """
        message, mark, proof = sealed.rpartition(b"\n")
        if not mark:
            raise ProtocolError("greeting", sealed[:32], "a JSON object, a line feed and a proof")
        self._verify(self._other, message, proof.decode("ascii", "replace"))
        return message

    def _message(self, kind: str, proof: str | None = None) -> bytes:
        data: dict[str, object] = {
            "afd": kind,
            "protocol": PROTOCOL_VERSION,
            "secret": self._secret is not None,
            "nonce": self._nonce,
        }
        if proof is not None:
            data["proof"] = proof
        return json.dumps(data, separators=(",", ":")).encode()

    def _read(self, kind: str, data: dict[str, object]) -> str:
        """The other side's nonce."""
        if data.get("afd") != kind:
            raise ProtocolError("afd", data.get("afd"), kind)
        if data.get("protocol") != PROTOCOL_VERSION:
            raise ProtocolError("protocol", data.get("protocol"), str(PROTOCOL_VERSION))
        nonce, has = data.get("nonce"), data.get("secret")
        if not isinstance(nonce, str) or len(nonce) != _NONCE_DIGITS or not set(nonce) <= set("0123456789abcdef"):
            raise ProtocolError("nonce", nonce, f"{_NONCE_DIGITS} hexadecimal digits in lower case")
        if not isinstance(has, bool):
            raise ProtocolError("secret", has, "true or false")
        if has != (self._secret is not None):
            sides = {True: self._other, False: self._role}
            raise SecretError(ONE_SIDED.format(has=sides[has], lacks=sides[not has]))
        return nonce

    def _proof(self, role: str, message: bytes) -> str:
        if self._secret is None:
            return ""
        said = f"afdpatch {PROTOCOL_VERSION} {role} {self._nonces} ".encode() + message
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()

    def _verify(self, role: str, message: bytes, proof: object) -> None:
        expected = self._proof(role, message).encode()
        if not isinstance(proof, str) or not hmac.compare_digest(expected, proof.encode("utf-8", "replace")):
            raise SecretError(DIFFER)
        self.proved = True

"""The shared secret: its file, its proofs, and two real servers with and without it."""

import json
import os
import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afdpatch.runtime.config import ConfigError
from afdpatch.runtime.connectors.base import ConnectionRefused
from afdpatch.runtime.protocol import PROTOCOL_VERSION, Mismatch, ProtocolError, Refusal
from afdpatch.runtime.secret import DIFFER, DRAINS, Handshake, SecretError, read_secret

from .helpers import HIDDEN, connected, ffn_process, greeting, until
from .strangers import challenged, framed, stranger, unframed

SECRET, OTHER = b"sixteen letters!", b"sixteen others.."
WORDS = "call Mallory to repair this"


def write(path, data=SECRET, mode=0o600):
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def test_a_secret_is_the_bytes_of_its_file(tmp_path):
    assert read_secret(write(tmp_path / "s")) == SECRET
    assert read_secret(None) is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: write(path, b"x" * 15), "15 bytes; needed: 16 to 4096"),
        (lambda path: write(path, b"passwordpassword"), "7 different bytes; needed: at least 8"),
        (lambda path: write(path, b"\0" * 32), "1 different bytes"),
        (lambda path: write(path, b"x" * 4097), "more than 4096 bytes"),
        (lambda path: write(path, mode=0o640), "mode 0640; others must not read it: chmod 600"),
        (lambda path: write(path, mode=0o604), "mode 0604"),
        (lambda path: str(path), "No such file"),
        (lambda path: path.mkdir(0o700) or str(path), "not a plain file"),
        (lambda path: os.mkfifo(path, 0o600) or str(path), "not a plain file"),
    ],
    ids=["short", "guessed", "zeros", "long", "group", "others", "absent", "folder", "fifo"],
)
def test_a_file_that_is_no_secret_is_a_configuration_error(tmp_path, make, expected):
    with pytest.raises(ConfigError, match="secret_file") as caught:
        read_secret(make(tmp_path / "s"))
    assert expected in str(caught.value)


def shake(ours, theirs):
    attention, ffn = Handshake("attention", ours), Handshake("ffn", theirs)
    assert attention.check_challenge(ffn.challenge(attention.hello())) is None
    return attention, ffn


@pytest.mark.parametrize("secret", [None, SECRET])
@given(message=st.binary(max_size=50))
def test_greetings_pass_between_those_who_share(secret, message):
    attention, ffn = shake(secret, secret)
    assert ffn.open(attention.seal(message)) == message == attention.open(ffn.seal(message))


def test_a_proof_is_for_its_message_its_sender_and_its_connection():
    attention, ffn = shake(SECRET, SECRET)
    sealed = attention.seal(b"hello")
    with pytest.raises(SecretError):
        ffn.open(sealed.replace(b"hello", b"hullo"))
    with pytest.raises(SecretError):
        attention.open(sealed)
    with pytest.raises(SecretError):
        shake(SECRET, SECRET)[1].open(sealed)
    with pytest.raises(ProtocolError):
        ffn.open(b"hello")


def test_another_secret_or_one_on_one_side_is_told():
    attention, ffn = Handshake("attention", SECRET), Handshake("ffn", OTHER)
    with pytest.raises(SecretError, match="differ"):
        attention.check_challenge(ffn.challenge(attention.hello()))
    for ours, theirs, has in ((SECRET, None, "attention"), (None, SECRET, "ffn")):
        attention, ffn = Handshake("attention", ours), Handshake("ffn", theirs)
        with pytest.raises(SecretError, match=f"set on the {has} server and not on"):
            ffn.challenge(attention.hello())


@given(st.binary(max_size=200))
def test_random_bytes_are_no_handshake(data):
    for read in (Handshake("ffn", None).challenge, Handshake("attention", None).check_challenge):
        with pytest.raises(ProtocolError):
            read(data)


def test_a_refusal_in_the_place_of_a_challenge_is_given_back():
    refusal = Refusal("no", retry=True)
    assert Handshake("attention", SECRET).check_challenge(refusal.encode()) == refusal


def test_servers_that_share_a_secret_hop(address, page):
    with ffn_process(address, page, options={"secret": SECRET}), connected(address, secret=SECRET) as attention:
        assert attention.hop(torch.ones(1, HIDDEN), 0)[0, 0] == 2


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (SECRET, OTHER, "the shared secrets of the two servers differ"),
        (SECRET, None, "secret_file is set on the attention server and not on the ffn server"),
        (None, SECRET, "secret_file is set on the ffn server and not on the attention server"),
    ],
)
def test_a_secret_that_isnt_shared_is_told_on_both_sides(address, page, ours, theirs, expected):
    with ffn_process(address, page, options={"secret": theirs}):
        with pytest.raises(ConnectionRefused, match=expected) as caught, connected(address, secret=ours):
            pass
        assert not caught.value.retry
        until(lambda: page.snapshot().peers_refused == 1 and expected in page.snapshot().last_error, "counted and kept")
        assert page.snapshot().peers == 0


def test_who_has_not_proved_the_secret_puts_no_word_on_the_ffn_servers_page(address, page):
    sent = [
        {"afd": WORDS},
        {"afd": "hello", "protocol": WORDS},
        {"afd": "hello", "protocol": PROTOCOL_VERSION, "secret": WORDS, "nonce": "0" * 64},
        {"afd": "hello", "protocol": PROTOCOL_VERSION, "secret": True, "nonce": WORDS},
        {WORDS: WORDS},
        WORDS,
    ]
    with ffn_process(address, page, options={"secret": SECRET}):
        for number, message in enumerate(sent, 1):
            sock = stranger(address, framed(address, json.dumps(message).encode()))
            assert b"refused" in sock.recv(65536)
            until(lambda number=number: page.snapshot().peers_refused == number, "counted")
            assert "Mallory" not in page.snapshot().last_error
        refusals = [Refusal(WORDS), Refusal(DIFFER, (Mismatch(WORDS, WORDS, WORDS),)), Refusal("", retry=True)]
        for number, refusal in enumerate(refusals, len(sent) + 1):
            sock, _ = challenged(address, SECRET)
            sock.sendall(framed(address, refusal.encode()))
            assert b"refused" in sock.recv(65536)
            until(lambda number=number: page.snapshot().peers_refused == number, "counted")
            assert "Mallory" not in page.snapshot().last_error
        until(lambda: "hasn't proved the secret" in page.snapshot().last_error, "the last reason is kept")


@pytest.mark.parametrize(
    "answer",
    [
        Refusal(WORDS).encode(),
        Refusal(DIFFER, (Mismatch(WORDS, "1", "2"), Mismatch("protocol", WORDS, "3"))).encode(),
        json.dumps({"afd": WORDS}).encode(),
        json.dumps({"afd": "challenge", "protocol": WORDS}).encode(),
        json.dumps({"refused": WORDS, "mismatches": WORDS}).encode(),
        WORDS.encode(),
    ],
)
def test_who_has_not_proved_the_secret_puts_no_word_into_the_attention_servers_error(address, answer):
    family = (socket.AF_UNIX, socket.SOCK_SEQPACKET) if isinstance(address, str) else (socket.AF_INET,)
    with socket.socket(*family) as listener:
        listener.bind(address)
        listener.listen()

        def speak():
            sock, _ = listener.accept()
            sock.recv(65536)
            sock.sendall(framed(address, answer))
            sock.recv(65536)
            sock.close()

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(ConnectionRefused) as caught, connected(address, secret=SECRET):
            pass
        assert "Mallory" not in str(caught.value)
        thread.join(20)


def test_numbers_of_versions_and_reasons_of_ours_are_shown_of_everybody():
    handshake = Handshake("attention", SECRET)
    version = Mismatch("protocol", "3", "2")
    assert handshake.believed(Refusal(DRAINS, (version,), retry=True)) == Refusal(DRAINS, (version,), retry=True)
    assert Handshake("attention", None).believed(Refusal(WORDS)) == Refusal(WORDS)
    assert shake(SECRET, SECRET)[0].believed(Refusal(WORDS)) == Refusal(WORDS)


def test_the_messages_of_an_earlier_connection_are_worth_nothing(address, page):
    with ffn_process(address, page, options={"secret": SECRET}):
        sock, handshake = challenged(address, SECRET)
        sealed = handshake.seal(greeting("attention").encode())
        sock.close()
        sock = stranger(address, framed(address, handshake.hello()))
        assert b"challenge" in unframed(address, sock.recv(65536))
        socket.send_fds(sock, [framed(address, sealed)], [])
        assert b"differ" in sock.recv(65536)
        until(lambda: page.snapshot().peers_refused == 1, "counted")

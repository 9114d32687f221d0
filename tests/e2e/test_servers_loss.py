"""An FFN server killed in the middle of a layer and not started again in time, and what its return finds."""

import json
import threading
import urllib.error
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from afdpatch.cli.servers import Server, get_status
from tests.e2e.driver import LONG, rpc
from tests.e2e.servers import KEEP_GARBAGE, PROMPT, ask, said, until

CHUNK = 128
"""The most tokens of one step; a prompt of more is computed in several, and its blocks of 32 tokens are cached."""


def long_prompt(word: str) -> str:
    """A prompt of more than two steps that no other test has."""
    return f"{word}: {LONG * 3}"


def processes(server: Server) -> set[int]:
    """What processes the server has, by their own word."""
    with urllib.request.urlopen(f"{server.url}/afd/processes", timeout=10) as response:
        return {item["pid"] for item in json.loads(response.read())}


def health(server: Server) -> str:
    """Why a server isn't healthy; nothing when it is."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=10):
            return ""
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["reason"])


def prefix_hits(server: Server) -> float:
    """Tokens of prompts that were found in the prefix cache."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))


class Stream(threading.Thread):
    """A streamed completion, read to its end: its text, and the error that it ended with."""

    def __init__(self, server: Server, prompt: str) -> None:
        super().__init__(daemon=True)
        self.server, self.prompt = server, prompt
        self.text = ""
        self.error: Any = None
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        connection = HTTPConnection(self.server.host, self.server.port, timeout=120)
        body = {"model": "m", "prompt": self.prompt, "max_tokens": 900, "temperature": 0, "ignore_eos": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body | {"stream": True}), {"Content-Type": "application/json"}
        )
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                data = json.loads(line[6:])
                self.error = data.get("error", self.error)
                self.text += "".join(choice["text"] for choice in data.get("choices", ()))
                if len(self.text) > 20:
                    self.begun.set()
        connection.close()


def kill_in_the_second_chunk(attention: Server, ffn: Server, prompt: str) -> int:
    """The FFN's worker dies within layer 2 of the prompt's second step; the status of the answer."""
    rpc(ffn.url, "die_at", 2, CHUNK - 1, 2)
    status, _ = ask(attention, prompt=prompt)
    until(lambda: ffn.exit_code is not None, 60, "the FFN server ends without its worker")
    return status


def start_again(attention: Server, ffn: Server) -> None:
    """The FFN server in new processes, until the attention server has it."""
    ffn.start()
    ffn.wait_ready(300)
    until(lambda: get_status("127.0.0.1", attention.port, "/health") == 200, 30, "the attention server is healthy")


def test_without_the_eviction_the_same_prompt_gets_wrong_tokens(pair: tuple[Server, Server], alone: Server) -> None:
    attention, ffn = pair
    prompt = long_prompt("Garbage")
    keep = Path(attention.env[KEEP_GARBAGE])
    keep.touch()
    try:
        assert kill_in_the_second_chunk(attention, ffn, prompt) == 500
    finally:
        keep.unlink()
    start_again(attention, ffn)
    assert said(ask(attention, prompt=prompt)[1]) != said(ask(alone, prompt=prompt)[1])


def test_a_lost_step_ends_its_requests_and_not_the_server_and_leaves_nothing_behind(
    pair: tuple[Server, Server], alone: Server
) -> None:
    attention, ffn = pair
    prompt = long_prompt("Lost")
    before = processes(attention)
    decoding = Stream(attention, PROMPT)
    assert decoding.begun.wait(60)
    assert kill_in_the_second_chunk(attention, ffn, prompt) == 500
    decoding.join(60)
    assert not decoding.is_alive()
    assert decoding.error["code"] == 500

    assert "given up" in health(attention)
    status, answer = ask(attention)
    assert status == 503
    assert answer["error"]["type"] == "no_ffn_server"
    assert processes(attention) == before

    start_again(attention, ffn)
    hits = prefix_hits(attention)
    assert said(ask(attention, prompt=prompt)[1]) == said(ask(alone, prompt=prompt)[1])
    assert prefix_hits(attention) - hits >= CHUNK / 2  # what was computed before the lost step stayed
    expected = ask(alone, max_tokens=900, logprobs=None)[1]["choices"][0]["text"]
    assert expected.startswith(decoding.text)
    assert ask(attention, max_tokens=900, logprobs=None)[1]["choices"][0]["text"] == expected
    assert processes(attention) == before

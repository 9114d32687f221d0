"""What `demo` and `bench serve` conclude, and the client and the load against a small HTTP server."""

import argparse
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from afdpatch.cli import client, demo, load, main
from afdpatch.cli.bench_serve import order
from afdpatch.cli.client import Completion, Token
from afdpatch.cli.demo import compare, conclude
from afdpatch.cli.report import TextReporter
from afdpatch.cli.servers import Server


def answer(*tokens: tuple[str, float]) -> Completion:
    return Completion("p", [Token(text, logprob, 0.0) for text, logprob in tokens], "length")


def test_equal_answers_are_the_same() -> None:
    verdict = compare(answer((" a", -1.0), (" b", -2.0)), answer((" a", -1.0), (" b", -2.0)))
    assert verdict.same and str(verdict) == "all 2 tokens the same, log-probabilities too"


def test_a_gap_in_the_log_probabilities_is_told() -> None:
    verdict = compare(answer((" a", -1.0)), answer((" a", -1.25)))
    assert verdict.same and str(verdict) == "all 1 tokens the same, log-probabilities within 0.25"


def test_other_tokens_and_other_lengths_differ() -> None:
    assert compare(answer((" a", -1.0), (" b", -1.0)), answer((" a", -1.0), (" c", -1.0))).differs_at == 1
    assert str(compare(answer((" a", -1.0), (" b", -1.0)), answer((" a", -1.0)))) == "token 2 differs"
    assert not compare(None, None).same


def test_without_a_hop_equal_tokens_prove_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude([], {}, {}, TextReporter()) == 1
    assert "No hop was counted" in capsys.readouterr().out


class Api(http.server.BaseHTTPRequestHandler):
    """/v1/completions as vLLM streams it."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] == "absent":
            self.send_error(404, "no such model")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(body["max_tokens"]):
            last = number + 1 == body["max_tokens"]
            choice = {"text": f" {number}", "logprobs": None, "finish_reason": "length" if last else None}
            if body["logprobs"] is not None:
                choice["logprobs"] = {"tokens": [f" {number}"], "token_logprobs": [-0.5]}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        if body["model"] != "torn":
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_stream_is_read_token_by_token(api: str) -> None:
    lengths = [len(part.tokens) for part in client.stream(api, "m", "p", 3)]
    assert lengths == [1, 2, 3]
    whole = list(client.stream(api, "m", "p", 2))[-1]
    assert (whole.text, whole.finish, whole.tokens[0].logprob) == (" 0 1", "length", -0.5)


def test_a_refusal_and_a_torn_stream_are_errors(api: str) -> None:
    with pytest.raises(client.HttpError, match="expected status 200, found 404"):
        list(client.stream(api, "absent", "p", 1))
    with pytest.raises(client.HttpError, match="ended before its last event"):
        list(client.stream(api, "torn", "p", 1))


def test_a_round_asks_every_prompt_once(api: str) -> None:
    prompts = load.make_prompts(5, 10)
    measured = load.run_round("afd", api, "m", prompts, 4, concurrency=2)
    assert sorted(measured.texts) == sorted(prompts)
    assert (measured.tokens, len(measured.ttft), len(measured.tpot), measured.errors) == (20, 5, 5, [])
    assert load.run_round("afd", api, "absent", prompts, 4, 2).errors[4].startswith(api)


def test_prompts_have_no_beginning_in_common() -> None:
    prompts = load.make_prompts(50, 10)
    assert len({prompt.split()[0] for prompt in prompts}) == 50


def test_the_sides_alternate_and_neither_is_always_first() -> None:
    assert order(2) == ["stock", "afd", "afd", "stock"]


def test_ratios_compare_rounds_that_followed_each_other() -> None:
    rounds = [
        load.Measured(side, seconds=1.0, tokens=tokens)
        for side, tokens in (("stock", 10), ("afd", 5), ("afd", 8), ("stock", 8))
    ]
    assert load.ratios(rounds) == [0.5, 1.0]


def test_percentiles_interpolate() -> None:
    assert load.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert load.percentile([1.0, 2.0], 75) == 1.75


def test_answers_are_equal_only_when_they_are_in_every_round() -> None:
    rounds = [
        load.Measured("stock", texts={"p": "x", "q": "y"}),
        load.Measured("afd", texts={"p": "x", "q": "y"}),
        load.Measured("afd", texts={"p": "x", "q": "z"}),
    ]
    assert load.equal_answers(rounds) == (1, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--tokens", "0"], "--tokens 0: expected 1 or more"),
        (["bench", "serve", "--rounds", "0"], "--rounds 0: expected 1 or more"),
        (["bench", "serve", "--picture", "x.gif"], "expected a name that ends in .svg or .png"),
    ],
)
def test_wrong_usage_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_without_a_terminal_the_demo_says_that_it_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> None:
        raise OSError

    monkeypatch.setattr(client, "metrics", lambda url: {})
    monkeypatch.setattr(client, "stream", refuse)
    servers = [Server(name, [], 1, Path("log")) for name in ("attention", "ffn", "stock")]
    args = argparse.Namespace(prompt=["one"], tokens=3)
    assert demo.show(args, "m", servers, TextReporter()) == 1
    assert capsys.readouterr().out.startswith("asking both sides, 1 prompt of 3 tokens\n")


def test_bench_hop_says_on_stderr_what_it_measures() -> None:
    words = ["--round-trips", "10", "--rows", "1", "4", "--pauses-us", "0", "--hidden", "64", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "afdpatch", "bench", "hop", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "bench hop: 1 of 2: 0.125 KB, pause 0 us",
        "bench hop: 2 of 2: 0.5 KB, pause 0 us",
    ]
    assert [line["rows"] for line in json.loads(done.stdout)["results"]] == [1] * 4 + [4] * 4

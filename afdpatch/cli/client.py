"""A small client of vLLM's HTTP API: JSON, streamed completions, metrics. Standard library only."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class HttpError(OSError):
    """A server answered, but not with 200; the text has the status and what it said."""

    def __init__(self, text: str, status: int = 0, said: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.said = said


def request(
    url: str, body: Mapping[str, Any] | None = None, timeout: float = 60.0, key: str | None = None
) -> http.client.HTTPResponse:
    """GET, or POST a JSON body; `key` goes along as a bearer token.

    The response is open; closing it closes the connection. Raises HttpError, OSError.
    """
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    headers = {"Connection": "close", **({"Authorization": f"Bearer {key}"} if key else {})}
    if body is None:
        connection.request("GET", parts.path or "/", headers=headers)
    else:
        connection.request("POST", parts.path, json.dumps(body), {**headers, "Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        said = response.read(2000).decode(errors="replace")
        connection.close()
        raise HttpError(f"{url}: expected status 200, found {response.status}: {said}", response.status, said)
    return response


def get_json(url: str, body: Mapping[str, Any] | None = None, timeout: float = 60.0, key: str | None = None) -> Any:
    with request(url, body, timeout, key) as response:
        return json.load(response)


@dataclass
class Token:
    """One token of an answer: its text, its log-probability, and when it came (seconds since the request)."""

    text: str
    logprob: float | None
    seconds: float


@dataclass
class Completion:
    """A streamed answer so far; `finish` is vLLM's reason once it is whole."""

    prompt: str
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    first: float | None = None
    """When the first token came, and `last` the last one: seconds since the request."""
    last: float = 0.0

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


def stream(
    url: str, model: str, prompt: str, max_tokens: int, *, timeout: float = 120.0, **parameters: Any
) -> Iterator[Completion]:
    """Ask /v1/completions greedily; yields the same Completion as it grows. Raises HttpError, OSError, ValueError."""
    answer = Completion(prompt)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "stream": True,
        **parameters,
    }
    begin = time.perf_counter()
    with request(f"{url}/v1/completions", body, timeout) as response:
        for event in server_events(response):
            if event == "[DONE]":
                return
            data = json.loads(event)
            if "error" in data:
                raise HttpError(f"{url}: the stream ended with an error: {data['error']}")
            now = answer.last = time.perf_counter() - begin
            answer.first = now if answer.first is None else answer.first
            for choice in data["choices"]:
                logprobs = choice.get("logprobs") or {}
                texts = logprobs.get("tokens") or ([choice["text"]] if choice.get("text") else [])
                values = logprobs.get("token_logprobs") or [None] * len(texts)
                answer.tokens += [Token(text, value, now) for text, value in zip(texts, values, strict=True)]
                answer.finish = choice.get("finish_reason") or answer.finish
            yield answer
    raise HttpError(f"{url}: the stream ended before its last event")


def server_events(response: Any) -> Iterator[str]:
    """The `data` of each server-sent event."""
    for raw in response:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("data:"):
            yield line[5:].strip()


Metrics = dict[str, list[tuple[dict[str, str], float]]]


def metrics(url: str, timeout: float = 10.0) -> Metrics:
    """A server's /metrics by name: for each sample its labels and value."""
    with request(f"{url}/metrics", timeout=timeout) as response:
        return parse_metrics(response.read().decode())


def parse_metrics(text: str) -> Metrics:
    """Prometheus text."""
    found: Metrics = {}
    for line in text.splitlines():
        if sample := SAMPLE.match(line):
            labels = dict(LABEL.findall(sample["labels"] or ""))
            found.setdefault(sample["name"], []).append((labels, float(sample["value"])))
    return found


def total(samples: Metrics, name: str, **labels: str) -> float | None:
    """The sum of a metric's samples that have these labels, or None when there is none."""
    values = [value for own, value in samples.get(name, []) if labels.items() <= own.items()]
    return sum(values) if values else None

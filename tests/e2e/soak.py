"""Hours of service in minutes: a load that checks every token, vLLM's own bench client, and a peer killed every minute.

    python -m tests.e2e.soak --minutes 30 --output docs/bench/soak.json

Stock vLLM answers each prompt first, alone. Then two attention servers and two FFN servers serve the same prompts,
streamed to the end or hung up in mid-stream, while every minute a process of an FFN server (worker, EngineCore, API
server) is killed, stopped or asked to end, and the server is started again, whether or not the one before is back. An
attention server is killed once in a round too: what it had in flight is asked again at the other one, as a load
balancer would, and counted apart.
"""

import argparse
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afdpatch.cli import client
from afdpatch.cli.load import make_prompts, percentile
from afdpatch.cli.topology import stock
from tests.e2e.cluster import Cluster
from tests.e2e.servers import MODEL, ONE_THREAD, OPTIONS

FAULTS = [
    ("ffn0", "worker", signal.SIGKILL),
    ("ffn1", "engine-core", signal.SIGKILL),
    ("ffn0", "api", signal.SIGKILL),
    ("ffn1", "worker", signal.SIGSTOP),
    ("ffn0", "api", signal.SIGTERM),
    ("attention1", "worker", signal.SIGKILL),
]
"""(server, process, signal): one each minute, again and again; a server that isn't back yet loses its turn."""


@dataclass
class Question:
    """A prompt and how many tokens of its answer are asked for."""

    prompt: str
    tokens: int
    expected: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """What the load saw."""

    asked: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    hung_up: int = 0
    asked_again: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


def questions(count: int = 48) -> list[Question]:
    """Prompts of 4 to 200 words with different beginnings; every fourth begins with the whole one before it."""
    sizes = random.Random(1)
    found = [Question(prompt, sizes.randint(8, 64)) for prompt in make_prompts(count, 40)]
    for index, question in enumerate(found):
        if index % 4 == 3:
            question.prompt = found[index - 1].prompt + " " + question.prompt
        elif index % 4 == 1:
            question.prompt = " ".join(question.prompt.split()[:4])
        elif index % 4 == 2:
            question.prompt = " ".join([question.prompt] * 4)
    return found


def ask(url: str, question: Question, stop_after: int | None = None) -> tuple[list[str], float, float]:
    """The streamed tokens of an answer, its time, and the longest time between two of its tokens, in seconds."""
    begin = last = time.monotonic()
    pause = 0.0
    answer = client.Completion(question.prompt)
    stream = client.stream(url, "m", question.prompt, question.tokens, ignore_eos=True, timeout=300)
    for answer in stream:
        now = time.monotonic()
        pause, last = max(pause, now - last), now
        if stop_after is not None and len(answer.tokens) >= stop_after:
            stream.close()  # type: ignore[attr-defined]
            break
    return [token.text for token in answer.tokens], time.monotonic() - begin, pause


class Load:
    """Threads that ask an attention server questions until they are told to stop."""

    def __init__(self, cluster: Cluster, asked: list[Question], threads: int, think_s: float) -> None:
        self.cluster, self.questions, self.seen, self.think_s = cluster, asked, Seen(), think_s
        self.killed: set[str] = set()
        self._stop = threading.Event()
        self._next = itertools.count()
        names = [name for name in cluster.servers if name.startswith("attention")]
        self._threads = [
            threading.Thread(target=self._run, args=(names[index % len(names)], names), daemon=True)
            for index in range(threads)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(310)

    def _run(self, name: str, names: list[str]) -> None:
        while not self._stop.wait(self.think_s):
            number = next(self._next)
            question = self.questions[number % len(self.questions)]
            hang_up = question.tokens // 2 if number % 5 == 4 else None
            self._one(name, names, question, hang_up)

    def _one(self, name: str, names: list[str], question: Question, hang_up: int | None) -> None:
        seen = self.seen
        with seen.lock:
            seen.asked += 1
        for target in [name, *(other for other in names if other != name)]:
            try:
                tokens, seconds, pause = ask(self.cluster.servers[target].url, question, hang_up)
            except (OSError, ValueError) as error:
                if target in self.killed:
                    with seen.lock:
                        seen.asked_again += 1
                    continue
                with seen.lock:
                    seen.lost.append(f"{target}: {error}")
                return
            expected = question.expected[: len(tokens)] if hang_up else question.expected
            with seen.lock:
                seen.tokens += len(tokens)
                seen.seconds.append(seconds)
                seen.pauses.append(pause)
                seen.hung_up += hang_up is not None
                if tokens == expected and len(tokens) >= (hang_up or question.tokens):
                    seen.right += 1
                else:
                    seen.wrong.append(f"{target}: {question.prompt[:40]!r}: found {tokens}, expected {expected}")
            return
        with seen.lock:
            seen.lost.append(f"no attention server took {question.prompt[:40]!r}")


def bench_client(cluster: Cluster, minutes: float, folder: Path) -> "subprocess.Popen[bytes]":
    """vLLM's own bench client on the first attention server, for about as long as the soak."""
    rate = 0.25  # a second
    prompts = max(8, int(minutes * 60 * rate))
    command = [sys.executable, "-m", "afdpatch", "vllm", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", cluster.servers["attention0"].url, "--model", "m", "--tokenizer", str(MODEL)]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--ignore-eos"]
    command += ["--num-prompts", str(prompts), "--request-rate", str(rate), "--seed", "0"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "bench.json"]
    log = (folder / "bench.log").open("wb")
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **ONE_THREAD})


class Faults(threading.Thread):
    """A fault each `every` seconds, on the next server in turn that is whole; the servers are mended beside it.

    `told` has one entry for each fault, `due_s` and `at_s` after the begin; `error` what kept a server from returning.
    """

    def __init__(self, cluster: Cluster, load: Load, minutes: float, every: float) -> None:
        super().__init__(daemon=True)
        self.cluster, self.load = cluster, load
        self.told: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self._times = [every * number for number in range(1, int(minutes * 60 / every))]
        self._mending: dict[str, threading.Thread] = {}
        self._begin = time.monotonic()

    def run(self) -> None:
        """Do it, and wait until every server is back."""
        tick = threading.Event()
        turn = itertools.cycle(FAULTS)
        for due in self._times:
            while time.monotonic() < self._begin + due or len(self._broken()) == len({name for name, *_ in FAULTS}):
                tick.wait(0.1)
            broken = self._broken()
            name, part, sign = next(fault for fault in turn if fault[0] not in broken)
            fault = {"number": len(self.told), "due_s": due, "at_s": round(time.monotonic() - self._begin, 1)}
            fault |= {"server": name, "process": part, "signal": sign.name, "down_already": sorted(broken)}
            self.told.append(fault)
            self._mending[name] = threading.Thread(target=self._strike, args=(fault, name, part, sign), daemon=True)
            self._mending[name].start()
        for thread in self._mending.values():
            thread.join(400)

    def _broken(self) -> set[str]:
        return {name for name, thread in self._mending.items() if thread.is_alive()}

    def _strike(self, fault: dict[str, Any], name: str, part: str, sign: signal.Signals) -> None:
        try:
            self._one(fault, name, part, sign)
        except BaseException as error:
            self.error = error
            raise

    def _one(self, fault: dict[str, Any], name: str, part: str, sign: signal.Signals) -> None:
        begin, tick = time.monotonic(), threading.Event()
        if name.startswith("attention"):
            self.load.killed.add(name)
        server = self.cluster.servers[name]
        pid = self.cluster.signal(name, part, sign)
        if sign is signal.SIGSTOP:
            tick.wait(20)
            os.kill(pid, signal.SIGCONT)
            server.check()
        else:
            while server.exit_code is None and time.monotonic() < begin + 60:
                tick.wait(0.1)
            fault["ended_after_s"] = round(time.monotonic() - begin, 1)
            server.stop()
            self.cluster.start(name)
        self.cluster.wait(name, timeout=300)
        fault["back_after_s"] = round(time.monotonic() - begin, 1)
        self.load.killed.discard(name)
        print(f"fault {fault}", flush=True)


def soak(minutes: float, folder: Path, *, every: float, threads: int, think_s: float) -> dict[str, Any]:
    """Run it; the report."""
    asked = questions()
    alone = stock(OPTIONS, folder, binding={"VLLM_CPU_OMP_THREADS_BIND": "0"})
    alone.env |= ONE_THREAD
    with alone:
        alone.wait_ready(300)
        for question in asked:
            question.expected = ask(alone.url, question)[0]
    cluster = Cluster(OPTIONS, folder, attention=2, ffn=2, extra={"hop_timeout_s": 10, "recovery_timeout_s": 280})
    with cluster:
        cluster.wait()
        begin = time.monotonic()
        bench = bench_client(cluster, minutes, folder)
        with Load(cluster, asked, threads, think_s) as load:
            struck = Faults(cluster, load, minutes, every)
            struck.start()
            struck.join(minutes * 60 + 600)
            assert not struck.is_alive(), "expected every server back within ten minutes of the last fault"
            if struck.error:
                raise struck.error
            told = struck.told
            tick = threading.Event()
            while time.monotonic() < begin + minutes * 60:
                tick.wait(0.2)
        try:
            code: int | None = bench.wait(300)
        except subprocess.TimeoutExpired:
            bench.kill()
            code = None
        seconds = time.monotonic() - begin
        pages = {name: client.metrics(server.url) for name, server in cluster.servers.items()}
    seen = load.seen
    bench_result = json.loads((folder / "bench.json").read_text()) if (folder / "bench.json").exists() else {}
    counted = Counter(fault["process"] + " " + fault["signal"] for fault in told)
    return {
        "what": "soak: 2 attention servers, 2 FFN servers",
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"python": platform.python_version(), "processor": platform.processor() or platform.machine()},
        "minutes": round(seconds / 60, 1),
        "requests": {
            "asked": seen.asked,
            "right": seen.right,
            "wrong": seen.wrong,
            "lost": seen.lost,
            "hung_up_by_the_client": seen.hung_up,
            "asked_again_after_their_own_server_was_killed": seen.asked_again,
        },
        "tokens_checked": seen.tokens,
        "seconds_a_request": {f"p{p}": round(percentile(seen.seconds, p), 2) for p in (50, 99, 100)},
        "longest_pause_in_a_stream_s": {f"p{p}": round(percentile(seen.pauses, p), 2) for p in (50, 99, 100)},
        "faults": told,
        "faults_by_kind": dict(counted),
        "bench_client": {"exit_code": code}
        | {key: bench_result.get(key) for key in ("completed", "failed", "total_output_tokens", "mean_tpot_ms")},
        "counters": {
            name: {key: client.total(page, f"afd_{key}_total") for key in COUNTERS} for name, page in pages.items()
        },
    }


COUNTERS = (
    "hops",
    "hops_repeated",
    "peers_lost",
    "peers_returned",
    "takeovers",
    "hops_merged",
    "errors",
    "peers_refused",
)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two faults")
    parser.add_argument("--threads", type=int, default=4, help="requests at a time")
    parser.add_argument("--think", type=float, default=1.0, help="seconds between an answer and the next question")
    parser.add_argument("--folder", type=Path, help="where the logs go (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = soak(args.minutes, folder, every=args.every, threads=args.threads, think_s=args.think)
    text = json.dumps(report, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    found = report["requests"]
    return 1 if found["wrong"] or found["lost"] or not found["right"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""A attention servers and F FFN servers as children of a test: started, killed part by part, started again."""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from afdpatch.cli import client
from afdpatch.cli.load import make_prompts
from afdpatch.cli.servers import Server, children, free_port, stop_all, wait_all
from tests.e2e.servers import ONE_THREAD

ZEROABLE = ["--worker-cls", "tests.e2e.workers.SwitchableFFNWorker"]
EXTRA: dict[str, object] = {"hop_timeout_s": 8, "recovery_timeout_s": 150, "peer_timeout_s": 8}
SHORT, LONG = make_prompts(2, 8)[0], " ".join(make_prompts(8, 30))
TOKENS = 40
PARTS = ("api", "engine-core", "worker")
"""The processes of a server that can be killed by themselves."""


class Cluster:
    """Servers by name: `attention0`, `attention1`, ..., `ffn0`, `ffn1`, ...; attention i and FFN i have the rank i.

    Args:
        words: the model and vLLM's options, for all servers.
        folder: where the logs go, one for each start of a server.
        extra: `connector_extra_config` of all of them.
        attention_options, ffn_options: vLLM's options for one role alone.
        cores: which core each server's thread is bound to, round robin over the servers in their order.
        connector, host: where the roles meet.
        within: for some servers, words before the command (`ip netns exec NAME`) and the host of their HTTP server.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        attention: int = 1,
        ffn: int = 1,
        extra: dict[str, object] | None = None,
        attention_options: Sequence[str] = (),
        ffn_options: Sequence[str] = (),
        cores: Sequence[str] = ("0", "1"),
        connector: str = "shm",
        host: str = "127.0.0.1",
        within: Mapping[str, tuple[list[str], str]] | None = None,
    ) -> None:
        self.folder = folder
        self.starts: dict[str, int] = {}
        self._commands: dict[str, tuple[list[str], int, dict[str, str], str]] = {}
        self.servers: dict[str, Server] = {}
        ports: list[int] = []
        for _ in range(attention + ffn + 1):
            ports.append(free_port(ports))
        afd_port = ports.pop()
        names = [("ffn", rank) for rank in range(ffn)] + [("attention", rank) for rank in range(attention)]
        for index, (role, rank) in enumerate(names):
            afd = {
                "role": role,
                "rank": rank,
                "connector": connector,
                "host": host,
                "port": afd_port,
                "num_attention_ranks": attention,
                "num_ffn_ranks": ffn,
                "connector_extra_config": extra or {},
            }
            command = [sys.executable, "-m", "afdpatch", "vllm", "serve", *words, "--port", str(ports[index])]
            own = ffn_options if role == "ffn" else attention_options
            command += [*own, "--additional-config", json.dumps({"afd": afd})]
            env = {**ONE_THREAD, "VLLM_CPU_OMP_THREADS_BIND": cores[index % len(cores)]}
            before, at = (within or {}).get(f"{role}{rank}", ([], "127.0.0.1"))
            self._commands[f"{role}{rank}"] = ([*before, *command], ports[index], env, at)

    def __enter__(self) -> "Cluster":
        for name in self._commands:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(list(self.servers.values()))

    def start(self, name: str) -> Server:
        """Start a server, or start it again on the same ports with a log of its own."""
        command, port, env, host = self._commands[name]
        self.starts[name] = self.starts.get(name, 0) + 1
        server = Server(name, command, port, self.folder / f"{name}.{self.starts[name]}.log", env=env, host=host)
        self.servers[name] = server
        server.start()
        return server

    def environment(self, name: str, **env: str | None) -> None:
        """Lay variables over a server's environment from its next start on; None takes one away."""
        command, port, own, host = self._commands[name]
        merged = own | {key: value for key, value in env.items() if value is not None}
        kept = {key: value for key, value in merged.items() if env.get(key, value) is not None}
        self._commands[name] = (command, port, kept, host)

    def options(self, name: str, **extra: object) -> None:
        """Lay `connector_extra_config` over a server's from its next start on."""
        words, *rest = self._commands[name]
        afd = json.loads(words[-1])["afd"]
        afd["connector_extra_config"] = afd["connector_extra_config"] | extra
        self._commands[name] = ([*words[:-1], json.dumps({"afd": afd})], *rest)  # type: ignore[assignment]

    def another(self, like: str, name: str, extra: dict[str, object]) -> Server:
        """A server like one of these with other `connector_extra_config`, on an HTTP port of its own; not started."""
        command, _, env, host = self._commands[like]
        words = list(command)
        afd = json.loads(words[-1])["afd"]
        afd["connector_extra_config"] |= extra
        words[-1] = json.dumps({"afd": afd})
        own = free_port()
        words[words.index("--port") + 1] = str(own)
        return Server(name, words, own, self.folder / f"{name}.log", env=env, host=host)

    def wait(self, *names: str, timeout: float = 300) -> None:
        """Wait until these servers (default: all) answer /health with 200."""
        wait_all([self.servers[name] for name in names or self.servers], timeout)

    def pid(self, name: str, part: str) -> int:
        """The process id of a part of a server."""
        server = self.servers[name]
        if part == "worker":
            return int(client.total(client.metrics(server.url), "afd_worker_pid") or 0)
        main = server.main_pid
        assert main is not None, f"{name} is gone"
        return main if part == "api" else next(pid for pid in children(main) if "EngineCore" in title(pid))

    def signal(self, name: str, part: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a part of a server; its process id."""
        pid = self.pid(name, part)
        os.kill(pid, number)
        return pid


def title(pid: int) -> str:
    """A process's title, as ps shows it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def streamed(server: Server, prompt: str) -> list[str]:
    """A streamed answer's tokens; an error where it breaks."""
    *_, answer = client.stream(server.url, "m", prompt, TOKENS, ignore_eos=True, timeout=200)
    return [token.text for token in answer.tokens]


class Stream(threading.Thread):
    """An answer that comes while the test does something else."""

    def __init__(self, server: Server, prompt: str) -> None:
        super().__init__(daemon=True)
        self.server, self.prompt = server, prompt
        self.tokens: list[str] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Ask."""
        try:
            self.tokens = streamed(self.server, self.prompt)
        except (OSError, ValueError) as error:
            self.error = error

    def result(self, seconds: float) -> list[str]:
        """The tokens, within a bound."""
        self.join(seconds)
        assert not self.is_alive(), f"expected the stream of {self.server.name} to end within {seconds:g} s"
        assert self.error is None, self.error
        return self.tokens

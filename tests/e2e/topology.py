"""Servers of any topology: each with the plain command that a user would give it on its own host."""

import json
import sys
from pathlib import Path
from typing import Any

from afdpatch.cli.servers import Server, free_port
from afdpatch.cli.topology import SERVER_ENV
from tests.e2e.conftest import ONE_THREAD

KV = ["--kv-cache-memory-bytes", str(1 << 27)]


def server(
    name: str, model: Path, options: list[str], logs: Path, afd: dict[str, Any] | None = None, cores: str = "0"
) -> Server:
    """A vLLM server, with AFD if it is told so, not started yet.

    Args:
        name: of the server and its log.
        model: the checkpoint's folder.
        options: vLLM's.
        logs: the folder of its log.
        afd: `additional_config["afd"]`; None for stock vLLM.
        cores: one list for each worker, as VLLM_CPU_OMP_THREADS_BIND has them.
    """
    port = free_port()
    command = [sys.executable, "-m", "afdpatch", "vllm", "serve", str(model), "--port", str(port), *KV, *options]
    if afd is not None:
        command += ["--additional-config", json.dumps({"afd": afd})]
    env = {**SERVER_ENV, **ONE_THREAD, "VLLM_CPU_OMP_THREADS_BIND": cores}
    return Server(name, command, port, logs / f"{name}.log", env=env)

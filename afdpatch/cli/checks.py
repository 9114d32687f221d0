"""What can be known to be wrong before vLLM is imported: the model, the `afd` settings, ports, the logs' folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from afdpatch.cli import UsageError

# vLLM's options that take no value: all that begin so, and these.
SWITCHES = ("--no-", "--enable-", "--disable-", "-O")
FLAGS = {
    "--aggregate-engine-logging",
    "--allow-credentials",
    "--async-scheduling",
    "--enforce-eager",
    "--fully-sharded-loras",
    "--headless",
    "--kv-sharing-fast-prefill",
    "--language-model-only",
    "--return-tokens-as-token-ids",
    "--skip-tokenizer-init",
    "--trust-remote-code",
    "--use-tqdm-on-load",
}
MODEL_FILES = ("config.json", "params.json")
UNIX_SOCKETS = Path("/proc/net/unix")


def positionals(words: Sequence[str]) -> list[str]:
    """The words that are no option and no option's value, as far as that can be known without vLLM's parser."""
    found = []
    takes_value = False
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            name, equals, _ = word.partition("=")
            name = name.replace("_", "-")
            takes_value = not equals and name not in FLAGS and not name.startswith(SWITCHES)
        elif takes_value:
            takes_value = False
        else:
            found.append(word)
    return found


def option_value(words: Sequence[str], name: str) -> str | None:
    """What stands after `name`, or behind its `=`; None where it isn't given."""
    for position, word in enumerate(words):
        given, equals, value = word.partition("=")
        if given.replace("_", "-") == name:
            return value if equals else "".join(words[position + 1 : position + 2])
    return None


def count_of(words: Sequence[str], *names: str) -> int:
    """A number of vLLM's options, 1 where it isn't given or isn't one (vLLM says so)."""
    found = next((value for name in names if (value := option_value(words, name)) is not None), "1")
    return max(1, int(found)) if found.isascii() and found.isdigit() and len(found) < 6 else 1


def model_of(words: Sequence[str], usage: str) -> str | None:
    """The model that `vllm serve` would take from these words, None where a file of options may name it.

    Raises UsageError when there is none: vLLM would take a model of its own choice from the network.
    """
    found = [*positionals(words)[:1], option_value(words, "--model")]
    model = next((name for name in found if name), None)
    if model is None and option_value(words, "--config") is None:
        raise UsageError(f"expected a model, found none: {usage}")
    return model


def check_model(model: str | None, words: Sequence[str] = ()) -> None:
    """Refuse a path that is no model's folder. A name, for the Hugging Face Hub, is vLLM's to look up."""
    if model is None:
        return
    path = Path(model)
    if not (model.startswith(("/", "./", "../")) or model in (".", "..") or path.is_dir()) or path.is_file():
        return
    if option_value(words, "--hf-config-path") or any((path / name).is_file() for name in MODEL_FILES):
        return
    found = "a folder without one" if path.is_dir() else "no such folder"
    raise UsageError(f"{model}: expected a model's folder with a config.json, found {found}")


def check_options(words: Sequence[str]) -> None:
    """Refuse vLLM's options that AFD has no place in."""
    # vLLM's parser takes an option's beginning too. What a file of options says is found out by the server.
    if any(option_value(words, name) is not None for name in ("--grpc", "--grp", "--gr")):
        raise UsageError(
            "--grpc: not supported with a role, since health and metrics are served over HTTP; leave it out"
        )


def check_afd(afd: Mapping[str, Any]) -> Any:
    """The `afd` settings, parsed as the server will do it.

    Raises UsageError in the parser's own words.
    """
    from afdpatch.runtime.config import RPC_DEADLINE_S, AfdConfig, ConfigError

    try:
        deadline = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS") or RPC_DEADLINE_S)
    except ValueError:
        deadline = RPC_DEADLINE_S
    try:
        return AfdConfig.parse(afd, rpc_deadline_s=deadline)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def meeting_point(host: str, port: int, ffn_rank: int = 0) -> str:
    """The pair's socket as /proc/net/unix shows it: `address_of` of the connectors, which import torch."""
    name = f"{host}:{port}"
    if len(name.encode()) > 64:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f"@afdpatch/{name}/ffn{ffn_rank}"


def check_meeting_point(host: str, port: int, ffn_rank: int = 0) -> None:
    """Refuse a pair whose name another FFN server has."""
    name = meeting_point(host, port, ffn_rank)
    try:
        lines = UNIX_SOCKETS.read_text(errors="replace").splitlines()
    except OSError:
        return
    if any(line.rpartition(" ")[2] == name for line in lines):
        raise UsageError(
            f"--afd-port {port}: expected the pair's meeting point {name} to be free, found another FFN server there; "
            "choose another port, or end that server"
        )


def check_port(option: str, port: int, host: str) -> None:
    """Refuse a port that somebody listens on: /health would be theirs."""
    from afdpatch.cli.servers import port_is_free

    if not port_is_free(port, host):
        raise UsageError(f"{option} {port}: expected the port to be free on {host}, found a listener; choose another")


def make_log_dir(path: Path) -> None:
    """Make the folder of the logs. Raises UsageError where that can't be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise UsageError(f"--log-dir {path}: expected a folder that can be written, found: {error.strerror}") from None


def parse_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object from the command line."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option}: expected a JSON object, found {text!r} ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{option}: expected a JSON object, found {text!r}")
    return value


def at_least(low: int) -> Callable[[str], int]:
    """An option's type for argparse: an integer from `low` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer of at least {low}")
        return value

    return parse

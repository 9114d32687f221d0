"""Calls by name that reach a worker (`/collective_rpc`), and would change one role alone."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e
CODE = """
from afdpatch.patches.worker_cpu import AttentionWorker, FFNWorker
for worker in (AttentionWorker, FFNWorker):
    for call in ("reload_weights", "update_config", "checkpoint_prepare", "sleep", "wake_up"):
        try:
            getattr(object.__new__(worker), call)(weights_path="/new")
        except Exception as error:
            print(worker.__name__, call, type(error).__name__, error)
"""


def test_what_would_change_one_role_alone_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line.split(" ", 3) for line in done.stdout.splitlines() if line.startswith(("AttentionW", "FFNW"))]
    refused = {(worker, call): why for worker, call, error, why in said if error == "ConfigError"}
    both = {(w, c) for w in ("AttentionWorker", "FFNWorker") for c in ("reload_weights", "update_config")}
    both |= {("AttentionWorker", "checkpoint_prepare"), ("FFNWorker", "checkpoint_prepare")}
    assert refused.keys() == both | {("FFNWorker", "sleep"), ("FFNWorker", "wake_up")}
    for (_, call), why in refused.items():
        assert call in why and "not supported by AFD" in why

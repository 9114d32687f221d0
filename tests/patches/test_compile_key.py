"""vLLM's compile key follows the manifest's digest, and no host or port; it survives the way to a worker."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

PROGRAM = """
import json, pickle
from types import SimpleNamespace
from vllm.config import VllmConfig
from afdpatch.patches.models import tables
from afdpatch.patches.settings import AfdSettings
from afdpatch.registry.compile_key import CompileKey
from afdpatch.runtime.config import AfdConfig

def key(config):
    vllm = VllmConfig(additional_config=config)
    again = pickle.loads(pickle.dumps(vllm)).compute_hash()
    assert again == vllm.compute_hash(), "differs after pickling"
    return again

def ours(digest="d", **more):
    config = AfdConfig.parse({"role": "ffn", **more})
    return key(AfdSettings(config, tables().models["Qwen3MoeForCausalLM"], digest * 64, {}))

def theirs(digest, config):
    patches = SimpleNamespace(manifest=SimpleNamespace(name="t"), digest=digest)
    return key(CompileKey.around(config, patches, hidden=["port"]))

print(json.dumps({
    "off": key({}),
    "ours": [ours(), ours(host="10.0.0.7", port=9999), ours("e"), ours(role="attention")],
    "theirs": [theirs("d", {"port": 1}), theirs("d", {"port": 2}), theirs("e", {"port": 1}), theirs("d", {"x": 1})],
}))
"""


def test_the_key_changes_with_the_digest_and_not_with_host_or_port() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for keys in (found["ours"], found["theirs"]):
        assert keys[0] == keys[1]
        assert len({found["off"], *keys}) == 4

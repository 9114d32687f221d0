"""torch.compile runs what is installed, and the compile cache's key has the set's digest in it."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

from afdpatch.cli._registry import COMPILE_PROBE
from afdpatch.registry import Entry, Verdict
from afdpatch.registry.compile_key import CompileKey
from afdpatch.registry.probe import compile_probes, run_probes
from tests.registry.conftest import World

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch here")


def traced(name: str, replacement: str) -> Entry:
    return Entry(
        id=name,
        seam="s",
        target="p.m:" + name,
        kind="wrap",
        why="w",
        replacement=replacement,
        roles=("red",),
        path="traced",
    )


@needs_torch
def test_the_probe_passes_every_form_and_finds_what_dynamo_skips(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    import torch
    def good(original):
        def f(x): return original(x)
        return f
    @torch.compiler.disable
    def disabled(x): return x
    def bad(original):
        return disabled
    """
    world.write(f"{world.ours}/traced.py", source)
    monkeypatch.setenv("PYTHONPATH", str(world.site))
    entries = [traced("f", f"{world.ours}.traced:good"), traced("C.f", f"{world.ours}.traced:good")]
    entries += [traced("g", f"{world.ours}.traced:bad"), traced("h", f"{world.ours}.traced:none")]
    found = run_probes(entries, COMPILE_PROBE)
    assert (found["f"], found["C.f"]) == (False, False)
    assert str(found["g"]).startswith("torch.compile: ") and "disable" in str(found["g"])
    assert "none" in str(found["h"])


@needs_torch
def test_a_wrapt_proxy_would_be_found_out() -> None:
    import wrapt

    from afdpatch.patches.compile_probe import MARK, probe

    def proxy(original: Any) -> Any:
        return wrapt.FunctionWrapper(original, lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs) + MARK)

    for form in ("function", "method"):
        with pytest.raises(AssertionError, match="compiled, it gives 4; eagerly, 204"):
            probe(form, proxy)


def test_without_torch_the_probe_says_so(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    world.write("torch/__init__.py", "raise ImportError('no torch here')\n")
    monkeypatch.setenv("PYTHONPATH", str(world.site))
    found = compile_probes([traced("f", f"{world.ours}.patches:free")], COMPILE_PROBE)
    assert "no torch here" in str(found["f"])


def test_verify_reports_a_failed_compile_probe_as_such(world: World) -> None:
    from afdpatch.registry import Lock, SourceTree, identify, lock_path, verify

    world.declare(world.entry(path="traced"))
    assert world.pin() == 0
    lock = Lock.read(lock_path(world.manifest, "1.0"))
    tree = SourceTree.installed(world.package)
    probes: dict[str, bool | str] = {"core.free": "torch.compile: AssertionError: compiled, it gives 4"}
    report = verify(lock, tree, identify(tree), probes=probes)
    assert report.verdict is Verdict.PROBE_FAILED
    finding = report.entries[0].findings[0]
    assert "torch.compile" in finding.message and "it gives 4" in finding.found
    assert finding.symbol == f"{world.ours}.patches:free"


@pytest.mark.parametrize(
    ("answer", "code", "words"), [("True", 0, ""), ("False", 1, "returned false"), ("1/0", 1, "by zero")]
)
def test_an_entry_s_own_probe_is_asked_and_told(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    code: int,
    words: str,
) -> None:
    world.write(f"{world.ours}/probes.py", f"def works(): return {answer}\n")
    monkeypatch.setenv("PYTHONPATH", str(world.site))
    world.declare(world.entry(kind="official", path="traced", probe="OURS.probes:works"))
    assert world.pin() == 0
    capsys.readouterr()
    assert world.verify("--probe") == code
    out = " ".join(capsys.readouterr().out.split())
    assert words in out and ("its own probe failed" in out) == bool(code)


@pytest.mark.full  # imports vLLM; `verify --probe`, which CI runs too, asks the same
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM here")
def test_the_hop_is_once_in_the_compiled_graph_of_each_decoder_layer_and_a_missing_one_is_found() -> None:
    program = """
import torch
from afdpatch.patches import compile_probe, model
assert compile_probe.qwen3_moe() and compile_probe.deepseek_v2()
model.RemoteFFN.forward = lambda self, hidden_states: hidden_states + 200
try:
    compile_probe.qwen3_moe()
except AssertionError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "[0] calls of afdpatch::ffn" in done.stdout, done.stderr[-2000:]


# ---- the key -------------------------------------------------------------------------------------------------------


def a_set(name: str = "afd", digest: str = "a" * 64) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(name=name), digest=digest)


def test_the_key_has_the_digest_and_the_user_s_values_and_not_what_is_hidden() -> None:
    base = CompileKey.around({"x": 1, "host": "a"}, a_set(), hidden=["host"]).compute_hash()
    assert base == CompileKey.around({"x": 1, "host": "b"}, a_set(), hidden=["host"]).compute_hash()
    others = [
        CompileKey.around({"x": 2, "host": "a"}, a_set(), hidden=["host"]),
        CompileKey.around({"x": 1, "host": "a"}, a_set(digest="b" * 64), hidden=["host"]),
        CompileKey.around({"x": 1, "host": "a"}, a_set("other"), hidden=["host"]),
        CompileKey.around({"x": 1, "host": "a"}, a_set()),
    ]
    assert len({base, *(item.compute_hash() for item in others)}) == 5


def test_the_key_reads_like_the_user_s_dictionary_and_survives_pickling_and_copying() -> None:
    key = CompileKey.around({"x": 1}, a_set())
    for item in (key, pickle.loads(pickle.dumps(key)), deepcopy(key)):
        assert (item["x"], item.get("y", 2), dict(item), "x" in item) == (1, 2, {"x": 1}, True)
        assert item.compute_hash() == key.compute_hash()


class Theirs:
    role = "theirs"

    def __init__(self, value: str) -> None:
        self.value = value

    def compute_hash(self) -> str:
        return self.value


def test_several_sets_and_another_plug_in_s_object_share_the_place() -> None:
    both = CompileKey.around(CompileKey.around({"x": 1}, a_set("one")), a_set("two"))
    assert both.digests == {"one": "a" * 64, "two": "a" * 64}
    assert both.compute_hash() != CompileKey.around({"x": 1}, a_set("one")).compute_hash()
    keys = [CompileKey.around(Theirs(value), a_set()) for value in "ab"]
    assert keys[0].compute_hash() != keys[1].compute_hash()
    assert pickle.loads(pickle.dumps(keys[0])).role == "theirs"
    with pytest.raises(AttributeError):
        _ = both.role

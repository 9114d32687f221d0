"""The trained models still are what they were: perplexity of held-out text through AFD, stock vLLM and transformers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import compare
from tests.e2e.servers import MODELS

WINDOWS = 8
CASE = f"perplexity:{WINDOWS}"
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text, windows = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained(folder).encode(open(text).read())
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
rows = torch.tensor(tokens[: 512 * int(windows)]).view(-1, 512)
with torch.no_grad():
    logprobs = model(rows).logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None])
print(json.dumps({"sum": logprobs.sum().item(), "count": logprobs.numel()}))
"""


def perplexity(case: dict[str, Any]) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-case["sum"] / case["count"])


@pytest.mark.parametrize("model", ["qwen3-moe", pytest.param("deepseek-v2", marks=pytest.mark.full)])
def test_held_out_perplexity_equals_stock_vllms_and_transformers_within_one_percent(tmp_path: Path, model: str) -> None:
    pair = compare(MODELS / model, "bfloat16", [CASE], tmp_path)
    afd, stock = pair.afd["cases"][CASE], pair.stock["cases"][CASE]
    assert afd["count"] == stock["count"] == WINDOWS * 511
    assert afd["values"] == stock["values"]
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(MODELS / model), str(MODELS / "held-out.txt"), str(WINDOWS)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reference = json.loads(done.stdout.splitlines()[-1])
    assert reference["count"] == afd["count"]
    assert abs(perplexity(afd) / perplexity(reference) - 1) < 0.01
    assert perplexity(pair.afd["zero"][CASE]) > 2 * perplexity(afd)
    print(
        f"{model}: AFD {perplexity(afd):.3f}, stock {perplexity(stock):.3f}, transformers {perplexity(reference):.3f}"
    )

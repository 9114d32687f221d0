"""The EngineCore's end: a signal reaches the workers' hops through the status pages, and vLLM's handler as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.e2e
ENGINE = """
import math, os, signal, threading, time
from afdpatch.patches.engine import end_hops_at_a_signal
from afdpatch.runtime.status import ENVIRONMENT_KEY, StatusPage, StatusPages
page = StatusPage.create("attention", ranks=2)
os.environ[ENVIRONMENT_KEY] = page.path
pages = StatusPages(page.path).pages
end_hops_at_a_signal(6.0)
came = []
signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
tick, end = threading.Event(), time.monotonic() + 20
os.kill(os.getpid(), signal.SIGUSR1)
while not came and time.monotonic() < end:
    tick.wait(0.01)
assert page.ends_by_s == math.inf
before = time.monotonic()
os.kill(os.getpid(), signal.SIGTERM)
while not (len(came) == 2 and all(one.ends_by_s < math.inf for one in pages)) and time.monotonic() < end:
    tick.wait(0.01)
assert came == [signal.SIGUSR1, signal.SIGTERM]
assert all(before + 6 <= one.ends_by_s <= time.monotonic() + 6 for one in pages)
first = page.ends_by_s
for number in (signal.SIGTERM, signal.SIGUSR1):  # a keeper's second one, and a child's end
    seen = len(came)
    os.kill(os.getpid(), number)
    while len(came) == seen and time.monotonic() < end:
        tick.wait(0.01)
assert page.ends_by_s == first
print("seen")
"""


def test_sigterm_gives_the_workers_hops_a_deadline() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "seen\n", done.stderr
    assert "wakeup" not in done.stderr

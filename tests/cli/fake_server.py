"""A stand-in for a vLLM server: a tree of real processes whose every step waits for a file that the test makes.

/health answers 503 until `ready` exists in DIR. With `die` there, it logs an error and exits 3. It has a child in a
session of its own that ignores SIGTERM, as an engine that hangs does; `pids` lists both. With `stubborn` there, the
server itself ignores SIGTERM too. What `last words` holds is printed before it dies.
"""

import http.server
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

STUBBORN = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, b'{"data": [{"id": "fake-model"}]}')
        elif self.path == "/health":
            self.answer(200 if (folder / "ready").exists() else 503, b"")
        else:
            self.answer(404, b"")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def log(level: str, text: str) -> None:
    print(f"(Fake pid={os.getpid()}) {level} 01-01 00:00:00 [fake.py:1] {text}", flush=True)


def die_when_told() -> None:
    while not (folder / "die").exists():
        threading.Event().wait(0.02)
    if (folder / "last words").exists():
        print((folder / "last words").read_text(), flush=True)
    log("ERROR", "Traceback (most recent call last):")
    log("ERROR", "RuntimeError: the fake was told to die")
    os._exit(3)


if __name__ == "__main__":
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    stubborn = (folder / "stubborn").exists()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: os._exit(0))
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    (folder / "pids.new").write_text(f"{os.getpid()} {child.pid}")
    (folder / "pids.new").rename(folder / "pids")
    threading.Thread(target=die_when_told, daemon=True).start()
    log("INFO", "Starting to load model fake")
    log("WARNING", f"cores are {os.environ.get('VLLM_CPU_OMP_THREADS_BIND')}")
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

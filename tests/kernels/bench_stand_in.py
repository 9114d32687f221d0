"""In the place of `afdpatch.patches.bench_engine`: steps of made-up length, and an end where it is told so."""

import json
import os
import socket
import sys


def main() -> None:
    """As the real one, but a step takes a millisecond a request, half as much more with AFD, and a warm-up a second."""
    spec = json.loads(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rw") as line:
        if spec["model"] == "dead":
            os._exit(3)
        line.write(json.dumps({"vllm": "1.2.3", "start_s": 7.5}) + "\n")
        line.flush()
        for text in iter(line.readline, ""):
            order = json.loads(text)
            if spec["model"] == "silent":
                continue
            step = order["batch"] * (1.5 if spec["afd"] else 1.0) if order["number"] else 1000.0
            line.write(json.dumps({"first_ms": 10 * step, "steps_ms": [step] * (order["tokens"] - 1)}) + "\n")
            line.flush()


if __name__ == "__main__":
    main()

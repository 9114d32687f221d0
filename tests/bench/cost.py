"""What afdpatch costs: `python -m tests.bench.cost [OUT]` prints JSON (docs/registry.md has the figures).

The import is measured in fresh processes, in turn, as CPU time: after the standard modules that `import
vllm.engine.arg_utils` loads anyway, one imports nothing, one wrapt, one `afdpatch`, which arms the set. Calls: the
least of many rounds.
"""

import compileall
import json
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

import afdpatch

ROOT = Path(__file__).parents[2]
PAIRS = 7
VLLM_LOADS = (
    *(
        "argparse",
        "ast",
        "asyncio",
        "collections.abc",
        "contextlib",
        "copy",
        "dataclasses",
        "dis",
        "enum",
        "functools",
        "gc",
    ),
    *(
        "hashlib",
        "importlib.metadata",
        "importlib.resources",
        "importlib.util",
        "inspect",
        "json",
        "logging",
        "os",
        "pathlib",
    ),
    *(
        "pickle",
        "platform",
        "re",
        "subprocess",
        "tempfile",
        "threading",
        "types",
        "typing",
        "uuid",
        "weakref",
        "zipfile",
    ),
)
"""Standard modules that vLLM's own import loads."""
IMPORT = """
import sys, time
import {modules}
begin = time.process_time()
{what}
print(time.process_time() - begin)
"""


def import_ms(pairs: int = PAIRS) -> dict[str, Any]:
    """Milliseconds of CPU time of `import afdpatch`, from bytecode, and of wrapt, which is part of it."""
    for folder in (Path(afdpatch.__file__).parent, *(ROOT / name for name in ("kernels", "manifests", "patches"))):
        compileall.compile_dir(folder, quiet=2)
    found: dict[str, list[float]] = {"nothing": [], "wrapt": [], "afdpatch": []}
    for _ in range(pairs):
        for name, times in found.items():
            what = "pass" if name == "nothing" else f"import {name}"
            program = IMPORT.format(modules=", ".join(VLLM_LOADS), what=what)
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            times.append(float(done.stdout) * 1e3)
    return {
        name: {"least": round(min(times), 2), "median": round(sorted(times)[pairs // 2], 2)}
        for name, times in found.items()
    }


def call_ns() -> dict[str, float]:
    """Nanoseconds of a call: of a plain function, one in its place, a closure around it, and a wrapt proxy."""
    import wrapt

    def plain(x: int) -> int:
        return x

    def wrapped(original: Any) -> Any:
        def plain(x: int) -> int:
            return original(x)  # type: ignore[no-any-return]

        return plain

    functions = {
        "plain": plain,
        "replaced": lambda x: x,
        "wrapped": wrapped(plain),
        "wrapt": wrapt.FunctionWrapper(plain, lambda function, _, args, kwargs: function(*args, **kwargs)),
    }
    found = {}
    for name, function in functions.items():
        times = timeit.repeat("f(1)", globals={"f": function}, number=20000, repeat=20)
        found[name] = round(min(times) / 20000 * 1e9)
    return found


if __name__ == "__main__":
    text = json.dumps({"import_ms": import_ms(), "call_ns": call_ns(), "python": sys.version.split()[0]}, indent=2)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    print(text)

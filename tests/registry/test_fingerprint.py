from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from afdpatch.registry import SourceTree, fingerprint

OLD = "class A(B):\n    @deco\n    def f(self, x: int, y=1) -> str:\n        'doc'\n        return x + y  # note\n"


def taken(source: str, package: Path) -> tuple[str, str]:
    folder = package / "p"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(source, encoding="utf-8")
    symbol = SourceTree("p", package).resolve("p:A.f")
    return symbol.body, symbol.interface


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("# note", "# another note", set()),
        ("'doc'", "'other\\n        doc'", set()),
        ("        'doc'\n", "", set()),
        ("return x + y", "return (x +\n            y)", set()),
        ("class A(B):\n", "import os\n\n\nclass A(B):\n    'doc'\n    z: int = 1\n    'attribute doc'\n", set()),
        ("return x + y", "return x - y", {"body"}),
        ("return x + y", "x += 1\n        return x + y", {"body"}),
        ("        'doc'\n", "        None\n", {"body"}),
        ("y=1", "y=2", {"interface"}),
        ("y=1", "y=1, z=None", {"interface"}),
        ("x: int", "x: float", {"interface"}),
        ("-> str", "-> bytes", {"interface"}),
        ("@deco", "@other", {"interface"}),
        ("    @deco\n", "", {"interface"}),
        ("class A(B)", "class A(C)", {"interface"}),
        ("class A(B)", "class A(B, metaclass=M)", {"interface"}),
        ("class A", "@frozen\nclass A", {"interface"}),
        ("    def f", "    async def f", {"interface"}),
        ("x: int, y=1", "x: int, *, y=1", {"interface"}),
    ],
)
def test_what_counts_as_a_change(tmp_path: Path, old: str, new: str, changes: set[str]) -> None:
    assert OLD.count(old) == 1
    before, after = taken(OLD, tmp_path / "old"), taken(OLD.replace(old, new), tmp_path / "new")
    assert {part for part, one, two in zip(("body", "interface"), before, after, strict=True) if one != two} == changes


def test_a_second_definition_and_its_condition_count(tmp_path: Path) -> None:
    plain = "class A:\n    if X:\n        def f(self): return 1\n    else:\n        def f(self): return 2\n"
    other = plain.replace("if X", "if not X")
    second = plain.replace("return 2", "return 3")
    body, interface = taken(plain, tmp_path / "1")
    assert taken(other, tmp_path / "2")[0] == body
    assert taken(other, tmp_path / "2")[1] != interface
    assert taken(second, tmp_path / "3")[0] != body


def test_a_nested_docstring_does_not_count_and_a_returned_string_does() -> None:
    def of(source: str) -> str:
        return fingerprint.body(ast.parse(source).body)

    nested = "def f():\n    def g():\n        'doc'\n        return 1\n    return g\n"
    assert of(nested) == of(nested.replace("'doc'", "'other'")) == of(nested.replace("        'doc'\n", ""))
    assert of("def f():\n    'doc'\n") == of("def f(): pass")
    assert of("def f(): return 'a'") != of("def f(): return 'b'")
    assert of("def f(): return None") != of("def f(): return")
    assert of("def f(): return u'a'") == of("def f(): return 'a'")
    assert of("def f(): return 1") != of("def f(): return True")
    assert of("def f(): return {**a}") != of("def f(): return {a: a}")


# Everything whose syntax tree differs, or differed once, between Python versions.
ZOO = '''
import a.b as c
def f(x, /, y: "T" = 1, *args, z=0.1, w=1e100, **kwargs) -> None:
    """doc"""
    t = f"{x!r:>{y}} {y:} {z=} " "tail" f"{'nested'}" u"" ""
    u = f"a" "b" f"{x:%Y-%m-%d}" f""
    v = f"{x}{{literal}}{y:{z}.{w}}"
    b, c, d = b"\\xff", 1j, ...
    s = "\\u200b\\U0001fae8\\u0378\\ud800"
    match x:
        case None | True: pass
        case [1, *rest] if rest: return rest
        case {"k": v, **more}: return more
        case P(a, b=1): ...
        case _: pass
    with (open(x) as g, open(y)): pass
    a[1:2, ::3], a[b, c], a[(b, c)], a[:, None]
    lambda *, k=1: (yield)
    if (n := 10) > 5: del n
    try: pass
    except (A, B) as e: raise e from None
    else: pass
    finally: pass
    [i async for i in y if i for j in k]
    x: int
    x: int = 3
    global G
    return not -x ** 2 if x is not None else x in (1,)
async def g():
    async with a: await b
    async for i in x: yield i
@d.e(1)
class K(B, metaclass=M, **kw):
    "doc"
    a = b = 1
    "attribute doc"
    def __init__(self): "only doc"
'''

PROGRAM = """
import ast, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("fingerprint", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps([module.digest(module.normalise(ast.parse(open(f, "rb").read()))) for f in sys.argv[2:]]))
"""


def other_pythons() -> list[str]:
    names = [f"python3.{minor}" for minor in (10, 11, 12, 13)]
    found = {name: shutil.which(name) for name in names}
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for name in names:
        candidates = sorted(root.glob(f"{name.removeprefix('python')}.*/bin/{name}"))
        if candidates:
            found[name] = str(candidates[-1])
    return [path for name, path in found.items() if path and name != f"python3.{sys.version_info.minor}"]


def test_all_pythons_take_the_same_fingerprints(tmp_path: Path) -> None:
    zoo = tmp_path / "zoo.py"
    zoo.write_text(ZOO, encoding="utf-8")
    files = [str(zoo), str(Path(fingerprint.__file__)), __file__, ast.__file__, argparse_file()]
    mine = [fingerprint.digest(fingerprint.normalise(ast.parse(Path(file).read_bytes()))) for file in files]
    others = other_pythons()
    ran = 0
    for python in others:
        command = [python, "-I", "-c", PROGRAM, fingerprint.__file__, *files]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 127 or "command not found" in done.stderr:
            continue  # a pyenv shim without that version behind it
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == mine, python
        ran += 1
    if not ran:
        pytest.skip("no other Python here")


def argparse_file() -> str:
    import argparse

    return argparse.__file__

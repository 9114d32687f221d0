"""No command ends in a traceback: a reader that has gone, a Ctrl-C at any moment."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("words", [["list"], ["models"], ["map"], ["--help"]])
def test_a_reader_that_has_gone_ends_it_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "afdpatch", *words], stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)
    # argparse takes the error by itself where all of its text went out at once.
    assert done.returncode in ((0, 141) if words == ["--help"] else (141,))
    assert done.stderr == ""


def test_a_broken_pipe_of_something_else_is_not_hidden() -> None:
    code = (
        "import sys\nfrom afdpatch import cli\n"
        "def dispatch(*a, **k): raise BrokenPipeError('of a socket')\n"
        "cli.dispatch = dispatch\nsys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "of a socket" in done.stderr


AT = {
    "the import of the command line": "sys.modules['afdpatch.cli'] = Interrupting()",
    "the import of a command": "from afdpatch import cli; cli.importlib.import_module = interrupt",
    "the import of the command's libraries": "sys.modules['afdpatch.cli.topology'] = Interrupting()",
}


@pytest.mark.parametrize("moment", AT)
def test_a_ctrl_c_ends_it_quietly_with_130(moment: str) -> None:
    code = (
        "import os, runpy, signal, sys, types\nimport afdpatch\n"
        "def interrupt(*a, **k): signal.raise_signal(signal.SIGINT)\n"
        "class Interrupting(types.ModuleType):\n"
        "    def __init__(self): super().__init__('x')\n"
        "    def __getattr__(self, name): interrupt()\n"
        f"{AT[moment]}\n"
        "sys.argv[1:] = ['up', 'M', '--log-dir', '/dev/null/x']\n"
        "runpy.run_module('afdpatch', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("words", [["up", "M"], ["demo"], ["bench", "serve"]])
@pytest.mark.parametrize("folder", ["/dev/null/x", "/proc/x"])
def test_a_log_folder_that_cannot_be_made_is_one_line(words: list[str], folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "afdpatch", *words, "--log-dir", folder], capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"afdpatch: error: --log-dir {folder}: ")

"""Progress on stderr where there is no terminal."""

from __future__ import annotations

import pytest

from afdpatch.cli import progress as module


def test_a_short_command_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with module.progress("work", 3) as step:
        step(1, "one")
    assert capsys.readouterr() == ("", "")


def test_a_long_one_writes_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with module.progress("work", 3) as step:
        for number in range(60):
            now = number * 0.5
            step(number, f"step {number}")
    out, error = capsys.readouterr()
    assert out == ""
    assert error.splitlines() == ["work: 20 of 3, step 20", "work: 40 of 3, step 40"]


def test_a_cell_s_bars_don_t_end_it() -> None:
    assert module.markdown_table(["a", "b"], [["x|y", ""]]) == "| a | b |\n| --- | --- |\n| x\\|y |  |"

"""Fixtures of the tests on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .pairs import DEVICES, wait


@pytest.fixture
def streams() -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
    yield torch.cuda.Stream(DEVICES[0]), torch.cuda.Stream(DEVICES[1])
    wait()

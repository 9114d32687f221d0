"""Fixtures of the tests of connectors: an address of each transport, an FFN server's page, an FFN server."""

import pytest

from afdpatch.runtime.status import StatusPage
from tests.runtime.gpu_pair import capturing, pair, replays  # noqa: F401 - fixtures

from .helpers import ffn_process, new_address


@pytest.fixture(params=["shm", "tcp"])
def transport(request):
    return request.param


@pytest.fixture(params=["shm", "tcp"])
def address(request):
    return new_address(request.param)


@pytest.fixture
def page():
    return StatusPage.create("ffn")


@pytest.fixture
def ffn(address, page):
    with ffn_process(address, page) as process:
        yield process

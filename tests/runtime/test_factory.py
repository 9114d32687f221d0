"""The connectors that a configuration gives, with its secret, from one side to the other."""

import contextlib

import pytest
import torch

from afdpatch.runtime.config import AfdConfig, ConfigError
from afdpatch.runtime.connectors.factory import attention_connectors, ffn_connector
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.route import Route
from afdpatch.runtime.status import StatusPage

from .helpers import HIDDEN, compute, greeting, new_address


@pytest.mark.parametrize("connector", ["shm", "tcp", "P2pNcclAFDConnector"])
def test_a_route_and_a_loop_of_one_configuration_meet(tmp_path, connector):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    host, port = new_address("tcp")
    config = AfdConfig.parse(
        {
            "connector": connector,
            "host": host,
            "port": port,
            "num_attention_ranks": 2,
            "connector_extra_config": {"secret_file": str(secret)},
        }
    )
    page = StatusPage.create("ffn")
    loop = FfnLoop(ffn_connector(config, 0, page), compute, page, greeting("ffn"))
    loop.start()
    loop.serve()
    with contextlib.closing(Route(config, 1)) as route:
        route.connect(greeting("attention", rank=1))
        assert torch.equal(route.hop(torch.ones(2, HIDDEN), 0), torch.full((2, HIDDEN), 2.0))
    assert loop.stop()


def test_a_secret_that_cannot_be_read_is_told_before_anything_is_opened():
    config = AfdConfig.parse({"connector_extra_config": {"secret_file": "/nowhere/secret"}})
    for make in (attention_connectors, lambda config: ffn_connector(config, 0)):
        with pytest.raises(ConfigError, match="/nowhere/secret"):
            make(config)

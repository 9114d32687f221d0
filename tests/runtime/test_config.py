import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afdpatch.runtime.config import AfdConfig, ConfigError


def parse(**keys):
    return AfdConfig.parse(keys)


def test_defaults_are_afd_plugins_but_for_the_connector():
    config = parse()
    assert (config.role, config.host, config.port) == ("attention", "127.0.0.1", 1239)
    assert (config.num_attention_ranks, config.num_ffn_ranks) == (1, 1)
    assert (config.async_dp, config.compute_gate_on_attention) == (False, False)
    assert (config.connector, config.transport) == ("shm", "shm")
    assert (config.connect_timeout_s, config.hop_timeout_s) == (600, 60)


@pytest.mark.parametrize(
    ("alias", "key", "value"),
    [
        ("afd_role", "role", "ffn"),
        ("afd_connector", "connector", "GpuAsyncAFDConnector"),
        ("afd_host", "host", "h"),
        ("afd_port", "port", 7),
    ],
)
def test_an_alias_is_its_key_and_not_beside_it(alias, key, value):
    assert getattr(parse(**{alias: value}), key) == value
    with pytest.raises(ConfigError, match=f"{key}, {alias}") as caught:
        parse(**{key: value, alias: value})
    assert "the same setting" in str(caught.value)


def test_async_is_async_dp_and_needs_an_async_connector():
    assert parse(**{"async": "on", "connector": "GpuAsyncAFDConnector"}).async_dp is True
    with pytest.raises(ConfigError, match="async_dp"):
        parse(**{"async": True})


@pytest.mark.parametrize(("text", "value"), [("true", True), ("Yes", True), (1, True), ("off", False), (0, False)])
def test_booleans_are_read_as_afd_plugin_reads_them(text, value):
    assert parse(compute_gate_on_attention=text).compute_gate_on_attention is value


def test_a_port_may_be_a_numeric_string():
    assert parse(port=" 8080 ").port == 8080


@pytest.mark.parametrize(
    ("keys", "names", "allows"),
    [
        ({"rol": "ffn"}, "rol", "did you mean 'role'"),
        ({"enabled": True}, "enabled", "connector_extra_config"),
        ({"hop_timeout_s": 3}, "hop_timeout_s", "put it under connector_extra_config"),
        ({"role": "Attention"}, "role", "attention or ffn"),
        ({"role": None}, "role", "attention or ffn"),
        ({"port": True}, "port", "1 to 65535"),
        ({"port": 8.0}, "port", "1 to 65535"),
        ({"port": 0}, "port", "1 to 65535"),
        ({"port": 65536}, "port", "1 to 65535"),
        ({"port": "²"}, "port", "1 to 65535"),
        ({"host": " "}, "host", "isn't empty"),
        ({"host": 1}, "host", "isn't empty"),
        ({"num_attention_ranks": 0}, "num_attention_ranks", "at least 1"),
        ({"num_attention_ranks": True}, "num_attention_ranks", "at least 1"),
        ({"num_ffn_ranks": "1"}, "num_ffn_ranks", "at least 1"),
        ({"num_ffn_ranks": 2}, "num_ffn_ranks", "at most num_attention_ranks"),
        ({"async_dp": 2}, "async_dp", "true or false"),
        ({"compute_gate_on_attention": "maybe"}, "compute_gate_on_attention", "true or false"),
        ({"connector": "tcp"}, "connector", "shm, P2pNcclAFDConnector, GpuAsyncAFDConnector"),
        ({"connector_extra_config": None}, "connector_extra_config", "a mapping"),
        ({"connector_extra_config": {"spin": 1}}, "connector_extra_config.'spin'", "did you mean 'spin_us'"),
        ({"connector_extra_config": {"core_num": 8}}, "connector_extra_config.'core_num'", "allowed"),
        ({"connector_extra_config": {"spin_us": 1001}}, "connector_extra_config.spin_us", "0 to 1000"),
        ({"connector_extra_config": {"spin_us": 1.0}}, "connector_extra_config.spin_us", "0 to 1000"),
        ({"connector_extra_config": {"hop_timeout_s": 300}}, "connector_extra_config.hop_timeout_s", "below 300"),
        (
            {"connector_extra_config": {"hop_timeout_s": float("nan")}},
            "connector_extra_config.hop_timeout_s",
            "above 0",
        ),
        ({"connector_extra_config": {"connect_timeout_s": 0}}, "connector_extra_config.connect_timeout_s", "above 0"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(keys, names, allows):
    with pytest.raises(ConfigError) as caught:
        AfdConfig.parse(keys)
    text = str(caught.value)
    assert names in text and allows in text and "\n" not in text


@pytest.mark.parametrize(
    "name", ["CAMP2pAFDConnector", "CAMAsyncAFDConnector", "P2pHcclAFDConnector", "WindowAFDConnector"]
)
def test_ascend_connectors_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name} needs an Ascend NPU"):
        parse(connector=name)


@pytest.mark.parametrize("name", ["P2pNcclAFDConnector", "GpuAsyncAFDConnector"])
def test_afd_plugins_gpu_connectors_run_over_shared_memory_and_their_keys_are_noted(name):
    config = parse(connector=name, connector_extra_config={"ring_depth": 2, "core_num": 8, "spin_us": 5})
    assert (config.transport, config.ignored, config.spin_us) == ("shm", ("core_num", "ring_depth"), 5)


def test_the_hop_deadline_follows_a_shorter_rpc_deadline():
    keys = {"connector_extra_config": {"hop_timeout_s": 30}}
    assert AfdConfig.parse(keys).hop_timeout_s == 30
    with pytest.raises(ConfigError, match="below 20"):
        AfdConfig.parse(keys, rpc_deadline_s=20)


def test_a_configuration_survives_json_and_is_frozen():
    config = parse(
        role="ffn", connector="P2pNcclAFDConnector", num_attention_ranks=3, connector_extra_config={"spin_us": 0}
    )
    assert AfdConfig.parse(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1


@given(st.integers(1, 40), st.integers(1, 40))
def test_ffn_ranks_serve_consecutive_blocks_of_nearly_equal_size(attention, ffn):
    if ffn > attention:
        return
    config = parse(num_attention_ranks=attention, num_ffn_ranks=ffn)
    blocks = [config.attention_ranks_of(rank) for rank in range(ffn)]
    assert [rank for block in blocks for rank in block] == list(range(attention))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_anything_gives_a_configuration_or_a_configuration_error(value):
    for candidate in (value, {"connector_extra_config": value}, {"port": value}, {"role": value}, {"connector": value}):
        try:
            AfdConfig.parse(candidate)
        except ConfigError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("module", ["config", "status", "protocol", "metrics"])
def test_the_light_modules_import_no_torch(module):
    code = f"import sys, afdpatch.runtime.{module}; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

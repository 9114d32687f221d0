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
    assert (config.recovery_timeout_s, config.peer_timeout_s, config.merge) == (120, 30, True)
    assert (config.rank, config.ffn_tp, config.secret_file, config.ffn_addresses) == (0, 1, None, ())
    assert config.a2f_dtype == "auto"


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
        ({"rank": 1}, "rank", "0 to 0, as num_attention_ranks is 1"),
        ({"rank": 2, "role": "ffn", "num_ffn_ranks": 2}, "rank", "0 to 1, as num_ffn_ranks is 2"),
        ({"rank": True}, "rank", "0 to 0"),
        ({"async_dp": 2}, "async_dp", "true or false"),
        ({"compute_gate_on_attention": "maybe"}, "compute_gate_on_attention", "true or false"),
        ({"connector": "gloo"}, "connector", "shm, tcp, ipc, nccl, P2pNcclAFDConnector, GpuAsyncAFDConnector"),
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
        ({"connector_extra_config": {"recovery_timeout_s": 300}}, "recovery_timeout_s", "below 300"),
        ({"connector_extra_config": {"recovery_timeout_s": 20}}, "20 with hop_timeout_s 60", "at least hop_timeout_s"),
        ({"connector_extra_config": {"hop_timeout_s": 130}}, "120 with hop_timeout_s 130", "set both"),
        ({"connector_extra_config": {"peer_timeout_s": 1}}, "peer_timeout_s", "at least 2 s"),
        ({"connector_extra_config": {"merge": 2}}, "connector_extra_config.merge", "true or false"),
        ({"connector_extra_config": {"ffn_tp": 0}}, "connector_extra_config.ffn_tp", "at least 1"),
        ({"connector_extra_config": {"ffn_tp": 2}, "num_ffn_ranks": 3}, "ffn_tp", "a divisor of num_ffn_ranks"),
        ({"connector_extra_config": {"a2f_dtype": "fp8"}}, "connector_extra_config.a2f_dtype", "auto or fp8_e4m3"),
        ({"connector_extra_config": {"a2f_dtype": 8}}, "connector_extra_config.a2f_dtype", "auto or fp8_e4m3"),
        (
            {"connector": "nccl", "connector_extra_config": {"a2f_dtype": "fp8_e4m3"}},
            "fp8_e4m3 with connector 'nccl'",
            "only connector 'ipc' rounds",
        ),
        ({"connector_extra_config": {"secret_file": 1}}, "connector_extra_config.secret_file", "path of a file"),
        ({"connector_extra_config": {"ffn_addresses": ["a:1"]}}, "ffn_addresses", "only connectors 'tcp' and 'nccl'"),
        ({"connector_extra_config": {"ffn_addresses": "a:1"}, "connector": "tcp"}, "ffn_addresses", "a list"),
        ({"connector_extra_config": {"ffn_addresses": ["a"]}, "connector": "tcp"}, "ffn_addresses", "host:port"),
        ({"connector_extra_config": {"ffn_addresses": ["a:0"]}, "connector": "tcp"}, "ffn_addresses", "host:port"),
        ({"connector_extra_config": {"ffn_addresses": ["::1:8"]}, "connector": "tcp"}, "ffn_addresses", "brackets"),
        (
            {"connector_extra_config": {"ffn_addresses": ["a:1", "a:1"]}, "connector": "tcp", "num_ffn_ranks": 2},
            "ffn_addresses",
            "each address once",
        ),
        (
            {"connector_extra_config": {"ffn_addresses": ["localhost:1"]}, "connector": "tcp", "num_ffn_ranks": 2},
            "1 addresses for 2 FFN servers",
            "one for each",
        ),
        ({"connector": "tcp", "port": 65535, "num_ffn_ranks": 2}, "65535 for 2 FFN servers", "at most 65534"),
        ({"connector": "tcp", "host": "10.0.0.1"}, "'10.0.0.1', which isn't a loopback", "16 to 4096 random bytes"),
        (
            {"connector": "tcp", "connector_extra_config": {"ffn_addresses": ["[fe80::1]:7"]}},
            "'fe80::1', which isn't a loopback",
            "16 to 4096",
        ),
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
    keys = {"connector_extra_config": {"hop_timeout_s": 30, "recovery_timeout_s": 30}}
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


@pytest.mark.parametrize(
    "keys",
    [
        {"host": "10.0.0.1", "connector_extra_config": {"secret_file": "/s"}},
        {
            "host": "10.0.0.1",
            "num_ffn_ranks": 2,
            "connector_extra_config": {"ffn_addresses": ["localhost:7", "[::1]:8"]},
        },
    ],
)
def test_a_tcp_configuration_survives_json(keys):
    config = parse(connector="tcp", **keys)
    assert AfdConfig.parse(json.loads(json.dumps(config.to_dict()))) == config


def test_a_tcp_server_listens_at_its_own_address_or_at_port_and_number():
    config = parse(connector="tcp", num_ffn_ranks=4, connector_extra_config={"ffn_tp": 2})
    assert [config.ffn_address(rank) for rank in config.ffn_servers] == [("127.0.0.1", 1239), ("127.0.0.1", 1240)]
    with pytest.raises(ConfigError, match="allowed: 0, 2"):
        config.ffn_address(1)
    addresses = ["[::1]:7", "localhost:8"]
    config = parse(connector="tcp", num_ffn_ranks=2, connector_extra_config={"ffn_addresses": addresses})
    assert [config.ffn_address(rank) for rank in config.ffn_servers] == [("::1", 7), ("localhost", 8)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
def test_ranks_and_servers_meet_in_consecutive_blocks_of_nearly_equal_size(attention, servers, ffn_tp):
    config = parse(
        num_attention_ranks=attention, num_ffn_ranks=servers * ffn_tp, connector_extra_config={"ffn_tp": ffn_tp}
    )
    own = [config.ffn_ranks_of(rank) for rank in range(attention)]
    assert len(config.ffn_servers) == servers and {rank for block in own for rank in block} == set(config.ffn_servers)
    if attention >= servers:
        sizes = [sum(block == (server,) for block in own) for server in config.ffn_servers]
        assert sum(sizes) == attention and own == sorted(own)
    else:
        sizes = [len(block) for block in own]
        assert [rank for block in own for rank in block] == list(config.ffn_servers)
    assert max(sizes) - min(sizes) <= 1
    for rank in range(attention):
        others = config.fallbacks_of(rank)
        assert sorted((*own[rank], *others)) == list(config.ffn_servers)
        distances = [min(abs(other - home) for home in own[rank]) for other in others]
        assert distances == sorted(distances)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4))
def test_the_ranks_that_hop_for_a_group_use_all_servers_in_blocks_of_nearly_equal_size(groups, servers, size):
    config = parse(num_attention_ranks=groups * size, num_ffn_ranks=servers)
    leaders = range(0, groups * size, size)
    own = [config.ffn_ranks_of(rank, size) for rank in leaders]
    assert sorted({rank for block in own for rank in block}) == list(range(servers))
    assert max(map(len, own)) - min(map(len, own)) <= 1
    for rank, block in zip(leaders, own, strict=True):
        assert block == tuple(range(block[0], block[-1] + 1))
        assert sorted((*block, *config.fallbacks_of(rank, size))) == list(range(servers))
    with pytest.raises(ConfigError, match="attention rank"):
        config.ffn_ranks_of(leaders[-1] + 1, size + 1)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 40))
def test_groups_of_different_sizes_use_all_servers(sizes, servers):
    config = parse(num_attention_ranks=sum(sizes), num_ffn_ranks=servers)
    leaders = [sum(sizes[:number]) for number in range(len(sizes))]
    used = {server for pair in zip(leaders, sizes, strict=True) for server in config.ffn_ranks_of(*pair)}
    assert used == set(range(servers))


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

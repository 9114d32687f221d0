"""Any interleaving of ranks, layers, micro-batches and losses ends with the right answers, or a named error."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.connectors.base import NoFfnServer
from afdpatch.runtime.route import Route

from .helpers import HIDDEN, attention_connector, ffn_connector, greeting, new_address

RANKS = SERVERS = 2


class Mortal:
    """An FFN server in a thread: real sockets, which it can drop in the middle of anything, without a goodbye."""

    def __init__(self, address, rank):
        self.address = address
        self.rank = rank
        self.connector = None
        self.answered = []

    def start(self):
        if self.connector is not None:
            return
        self.dies = ""
        self.connector = ffn_connector(self.address, spin_us=0)
        self.connector.listen(greeting("ffn", rank=self.rank, num_ffn_ranks=SERVERS, num_attention_ranks=RANKS))
        self.connector.set_serving()
        self.thread = threading.Thread(target=self._run, args=(self.connector, []))
        self.thread.start()

    def _run(self, connector, answered):
        self.answered.append(answered)
        while self.dies != "now":
            for hop in connector.receive(0.2):
                if self.dies == "before its answer":
                    return self._vanish(connector)
                result = hop.hidden * 2 + hop.header.layer
                answered.append((hop.peer, hop.header.sequence))
                connector.reply(hop, result)
                if self.dies == "after its answer":
                    return self._vanish(connector)
        return self._vanish(connector)

    def _vanish(self, connector):
        connector._listener.close()
        for peer in connector._peers.values():
            peer.sock.close()
        connector.close()
        self.connector = None  # last: the address is free for the next start

    def die(self, when):
        connector = self.connector
        if connector is not None:
            self.dies = when
            if when == "now":
                connector.wake()
                self.thread.join(10)
                assert not self.thread.is_alive()

    @property
    def good(self):
        """Whether it answers whatever comes."""
        connector = self.connector
        return connector is not None and not self.dies and not connector.draining


hops = st.tuples(st.integers(0, 3), st.integers(1, 32), st.integers(0, 1))
faults = st.one_of(
    st.tuples(st.sampled_from(["now", "before its answer", "after its answer"]), st.integers(0, SERVERS - 1)),
    st.tuples(st.sampled_from(["start", "start", "drain", "resume"]), st.integers(0, SERVERS - 1)),
    st.tuples(st.just("tend"), st.integers(0, RANKS - 1)),
)
rounds = st.lists(
    st.tuples(st.lists(faults, max_size=2), st.lists(st.none() | hops, min_size=RANKS, max_size=RANKS)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(rounds=rounds)
def test_every_hop_has_its_own_answer_or_a_named_error(transport, rounds):
    addresses = [new_address(transport) for _ in range(SERVERS)]
    servers = [Mortal(address, rank) for rank, address in enumerate(addresses)]
    extra = {"hop_timeout_s": 20, "recovery_timeout_s": 20}
    config = AfdConfig.parse({"num_attention_ranks": RANKS, "num_ffn_ranks": SERVERS, "connector_extra_config": extra})
    routes = [
        Route(config, rank, None, lambda ffn_rank: attention_connector(addresses[ffn_rank], spin_us=0))
        for rank in range(RANKS)
    ]
    with ThreadPoolExecutor(RANKS) as pool:
        try:
            for server in servers:
                server.start()
            for rank, route in enumerate(routes):
                route.connect(greeting("attention", rank=rank, num_attention_ranks=RANKS, num_ffn_ranks=SERVERS))
            for number, (what, sent) in enumerate(rounds):
                for fault, index in what:
                    act(fault, index, servers, routes)
                must = any(server.good for server in servers)
                values = [
                    (rank, layer, micro_batch, torch.full((rows, HIDDEN), float(10 * number + rank)))
                    for rank, hop in enumerate(sent)
                    if hop is not None
                    for layer, rows, micro_batch in [hop]
                ]
                waiting = [pool.submit(send, routes[rank], must, *rest) for rank, *rest in values]
                for (_, layer, _, hidden), future in zip(values, waiting, strict=True):
                    result = future.result(60)
                    if result is None:
                        assert not must, "no answer, though a server was there all the time"
                    else:
                        assert torch.equal(result, hidden * 2 + layer)
        finally:
            for route in routes:
                route.close()
            for server in servers:
                server.die("now")
    for server in servers:
        for answered in server.answered:
            assert len(set(answered)) == len(answered), "a hop was answered twice on one connection"


def act(fault, index, servers, routes):
    if fault == "tend":
        routes[index].tend()
    elif fault == "start":
        servers[index].start()
    elif fault in ("drain", "resume"):
        connector = servers[index].connector
        if connector is not None:
            getattr(connector, fault)()
    else:
        servers[index].die(fault)


def send(route, must, layer, micro_batch, hidden):
    """The answer, or None when no server was found."""
    # Where no server may be left nobody waits long for one.
    route.begin_step(None if must else time.monotonic() + 0.3)
    try:
        return route.hop(hidden, layer, micro_batch)
    except NoFfnServer:
        return None

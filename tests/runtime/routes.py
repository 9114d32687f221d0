"""Routes to FFN servers that are real processes, each of which can be killed and started again."""

import contextlib

import torch

from afdpatch.runtime.config import AfdConfig
from afdpatch.runtime.route import Route
from afdpatch.runtime.status import StatusPage

from .helpers import (
    HIDDEN,
    attention_connector,
    ffn_process,
    greeting,
    new_address,
    until,
)

ONE = torch.ones(1, HIDDEN)


class Servers:
    """FFN servers of one configuration, each a process that can be started again."""

    def __init__(self, transport: str, count: int, attention: int) -> None:
        self.count = count
        self.attention = attention
        self.addresses = [new_address(transport) for _ in range(count)]
        self.pages = {}
        self.processes = {}
        self._stacks = {}

    def start(self, rank, *, rank_told=None, **options):
        self.pages[rank] = StatusPage.create("ffn")
        stack = self._stacks[rank] = contextlib.ExitStack()
        changes = {
            "rank": rank if rank_told is None else rank_told,
            "num_ffn_ranks": self.count,
            "num_attention_ranks": self.attention,
            **options,
        }
        self.processes[rank] = stack.enter_context(ffn_process(self.addresses[rank], self.pages[rank], **changes))

    def kill(self, rank):
        self._stacks.pop(rank).close()

    def stop_all(self):
        for rank in list(self._stacks):
            self.kill(rank)

    def hops(self, rank):
        return self.pages[rank].snapshot().hops

    def counted(self, rank, hops):
        """A server counts a hop once it has answered it."""
        until(lambda: self.hops(rank) == hops, f"{hops} hops at ffn{rank}")

    def make(self, rank):
        return attention_connector(self.addresses[rank])


@contextlib.contextmanager
def servers(transport, count, *, attention=2, start=True):
    found = Servers(transport, count, attention)
    try:
        if start:
            for rank in range(count):
                found.start(rank)
        yield found
    finally:
        found.stop_all()


@contextlib.contextmanager
def route_to(servers, page=None, *, rank=0, group=1, connect=True, **times):
    config = AfdConfig.parse(
        {
            "num_attention_ranks": servers.attention,
            "num_ffn_ranks": servers.count,
            "connector_extra_config": {"hop_timeout_s": 5, "recovery_timeout_s": 20, "connect_timeout_s": 20, **times},
        }
    )
    route = Route(config, rank, page, servers.make, group=group)
    try:
        if connect:
            route.connect(said(servers, rank))
            route.wait_ready()
        yield route
    finally:
        route.close()


def said(servers, rank=0):
    return greeting("attention", rank=rank, num_attention_ranks=servers.attention, num_ffn_ranks=servers.count)


def seen(page, event):
    return page.snapshot().events[event]

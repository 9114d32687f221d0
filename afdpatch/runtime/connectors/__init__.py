"""Connectors move hops between the roles; ``base`` is the contract, the other modules are transports."""

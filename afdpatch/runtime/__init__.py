"""AFD without vLLM: configuration, greeting, hops, connectors, the FFN loop, status and metrics."""

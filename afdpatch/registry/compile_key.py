"""The compile cache's key: no graph that was compiled without a set of patches, or with another one, is served with it.

vLLM's key of compiled graphs has in it what `VllmConfig.compute_hash` gives, and that asks an `additional_config`
which isn't a dictionary for its own `compute_hash`. The lines of a patch are not in the key by themselves: vLLM looks
again only at files that were inlined when the graph was compiled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class CompileKey(Mapping[str, Any]):
    """A user's `additional_config`, with the digests of patch sets in its hash; it reads like the dictionary it wraps.

    Set it where the configuration is made, before anything is compiled, and it is pickled to every process with it:

        vllm_config.additional_config = CompileKey.around(vllm_config.additional_config, patchset)

    Args:
        config: the user's values.
        digests: digests of the sets in effect, by the name of the manifest.
        hidden: keys of the user's values that change no graph (hosts, ports, deadlines) and stay out of the hash.
        inner: an object with `compute_hash` that stood in `additional_config` before, from another plug-in.
    """

    def __init__(
        self, config: Mapping[str, Any], digests: Mapping[str, str], hidden: Iterable[str] = (), inner: Any = None
    ) -> None:
        self.config = dict(config)
        self.digests = dict(digests)
        self.hidden = frozenset(hidden)
        self.inner = inner

    @classmethod
    def around(cls, config: Any, patchset: Any, *, hidden: Iterable[str] = ()) -> CompileKey:
        """Wraps what stands in `additional_config`: a dictionary, another object with `compute_hash`, or one of these.

        Args:
            config: what stands there now.
            patchset: the `PatchSet` whose digest enters.
            hidden: as above.

        Raises:
            OtherVersion: the set has no lock for the installed release, and so no digest.
        """
        digests = {patchset.manifest.name: patchset.digest}
        if isinstance(config, CompileKey):
            return cls(config.config, {**config.digests, **digests}, config.hidden | frozenset(hidden), config.inner)
        if isinstance(config, dict):
            return cls(config, digests, hidden)
        return cls({}, digests, hidden, inner=config)

    def compute_hash(self) -> str:
        """What vLLM takes into its key: the digests, and the user's values that aren't hidden."""
        values = {key: value for key, value in self.config.items() if key not in self.hidden}
        inner = self.inner.compute_hash() if self.inner is not None else None
        factors = [sorted(self.digests.items()), values, inner]
        return hashlib.sha256(json.dumps(factors, sort_keys=True, default=str).encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        # The other plug-in finds its own attributes; pickle asks for dunders before there is anything.
        if name.startswith("__") or self.__dict__.get("inner") is None:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, key: str) -> Any:
        return self.config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(self.digests.items()))
        return f"CompileKey({self.config!r}, {names})"

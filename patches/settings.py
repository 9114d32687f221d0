"""What AFD hangs on a server's VllmConfig: it stands in `additional_config` in the place of the user's dictionary."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from afdpatch.patches.models import ModelRow
from afdpatch.runtime.config import AfdConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


HOP_OP = "afdpatch::ffn"
"""The hop in a compiled model; `afdpatch.patches.model` registers it."""
CAPTURES = "afdpatch.captures"
"""Key in a forward context's `additional_kwargs`: in this forward, pieces of the model are captured into CUDA graphs,
and nothing is computed."""


class AfdSettings:
    """A server's role and model row, and, in a worker, its end of the connection.

    It is pickled to every process of the server; `link` and `kept` are of one process and are not pickled.

    Attributes:
        config: the user's `additional_config["afd"]`, parsed.
        row: the model's row of the table.
        digest: the manifest's digest.
        others: the user's other keys of `additional_config`.
        link: in a worker, the role's live objects (`afdpatch.patches.worker`); None elsewhere.
        kept: in the server's first process, what must live as long as the server: status page and roll.
    """

    def __init__(self, config: AfdConfig, row: ModelRow, digest: str, others: dict[str, Any]) -> None:
        self.config = config
        self.row = row
        self.digest = digest
        self.others = others
        self.link: Any = None
        self.kept: tuple[Any, ...] = ()

    @property
    def role(self) -> str:
        """ "attention" or "ffn"."""
        return self.config.role

    def compute_hash(self) -> str:
        """vLLM's compile hash takes this in: what changes the model's graph, and no host, port or deadline."""
        factors = [self.config.role, self.row.architecture, self.digest, self.others]
        return hashlib.sha256(json.dumps(factors, sort_keys=True, default=str).encode()).hexdigest()

    def get(self, key: str, default: Any = None) -> Any:
        """The user's other keys, as a dictionary would answer."""
        return self.others.get(key, default)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"link": None, "kept": ()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "AfdSettings":
        return self  # vLLM copies its configuration within a process; the link must stay one object

    def __repr__(self) -> str:
        return f"AfdSettings(role={self.role!r}, model={self.row.architecture!r}, digest={self.digest[:12]!r})"


def settings_of(vllm_config: "VllmConfig") -> AfdSettings | None:
    """The settings of a server with AFD on, None with AFD off."""
    settings = vllm_config.additional_config
    return settings if isinstance(settings, AfdSettings) else None

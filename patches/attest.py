"""Every process of a server says which patches are in effect in it; /health answers 503 until all say the same."""

import os

import afdpatch
from afdpatch.registry import PatchError
from afdpatch.registry.attest import ENVIRONMENT_KEY, Roll


def call_the_roll(role: str, *, engines: int = 1, workers: int = 1) -> Roll:
    """In the server's first process: make the roll and sign it; the caller keeps it as long as the server lives.

    A roll that the environment names is another server's, whose child this process is.

    Args:
        role: the server's.
        engines: how many EngineCores it has, one a data-parallel rank.
        workers: how many workers, over all of them.
    """
    used = afdpatch.patchset.used(role)
    expected = {"api": 1, "engine-core": engines, "worker": workers}  # more API servers are refused
    roll = Roll.create("afdpatch", role=role, digest=afdpatch.patchset.digest, expected=expected, used=used)
    os.environ[ENVIRONMENT_KEY] = roll.path
    sign()
    return roll


def sign() -> None:
    """Say what is in effect in this process, read back now; nothing if there is no roll."""
    roll = Roll.from_environment()
    if roll is not None:
        try:
            roll.sign(afdpatch.patchset.attest())
        finally:
            roll.close()


class Attested:
    """What the API server's middleware asks: whether all of the server's processes have the same patches in effect."""

    def __init__(self, roll: Roll | None = None) -> None:
        self._roll = roll or Roll.from_environment()

    def trouble(self) -> str | None:
        """Why the server is not ready, or None. This process is looked at anew, the others are taken by their word."""
        if self._roll is None:
            return "no roll of this server's processes; restart the server"
        try:
            mine = afdpatch.patchset.attest()
            signed = {item.pid: item for item in self._roll.attestations()}
            if mine["pid"] not in signed or signed[mine["pid"]].states != mine["states"]:
                self._roll.sign(mine)
            return self._roll.trouble()
        except (PatchError, OSError) as error:
            return str(error)

    def processes(self) -> list[dict[str, object]]:
        """What each process said."""
        return [dict(vars(item)) for item in self._roll.attestations()] if self._roll is not None else []

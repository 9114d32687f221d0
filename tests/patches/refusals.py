"""Builds vLLM configurations in one process: `python -m tests.patches.refusals CASES OUT`, both JSON files.

A case is {"args": EngineArgs' own, "env": {...}, "headless": bool, "argv": [...], "modules": [...]}. For each:
the exit code that a server would end with, its message, or what it would have come up as.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

import afdpatch


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """What a server with these arguments would do before it loads anything."""
    text = io.StringIO()
    argv, sys.argv = sys.argv, [*sys.argv, *case["argv"]]
    os.environ.update(case.get("env", {}))
    sys.modules.update({name: ModuleType(name) for name in case["modules"]})
    try:
        with contextlib.redirect_stderr(text):
            config = EngineArgs(**case["args"]).create_engine_config(
                UsageContext.OPENAI_API_SERVER, headless=case.get("headless", False)
            )
        return {
            "code": None,
            "settings": repr(config.additional_config),
            "worker": config.parallel_config.worker_cls,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "scheduler": str(config.scheduler_config.scheduler_cls),
            "is_moe": [config.model_config.is_moe, config.parallel_config.is_moe_model],
            "hash": config.compute_hash(),
            "page": os.environ.get("AFDPATCH_STATUS_PAGE"),
        }
    except SystemExit as error:
        return {"code": error.code, "message": text.getvalue()}
    except Exception as error:
        return {"code": f"{type(error).__name__}", "message": str(error)}
    finally:
        sys.argv = argv
        for name in case["modules"]:
            del sys.modules[name]
        for key in case.get("env", {}):
            del os.environ[key]
        os.environ.pop("AFDPATCH_STATUS_PAGE", None)
        os.environ.pop("AFDPATCH_ROLL", None)
        afdpatch.patchset.undo()
        afdpatch.patchset.arm()


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: outcome(case) for name, case in cases.items()}))

"""Worker seam: the two roles as mix-ins over a platform's own worker (afdpatch.patches.worker_cpu)."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import CompilationTimes

import afdpatch
from afdpatch.patches.model import ffns
from afdpatch.patches.settings import AfdSettings, settings_of
from afdpatch.runtime.connectors import attention_connector, ffn_connector
from afdpatch.runtime.ffn_loop import FfnLoop
from afdpatch.runtime.protocol import Greeting
from afdpatch.runtime.status import State, StatusPage

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM's handlers are on the logger "vllm"

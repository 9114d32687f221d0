"""Compiles `hop.cu`, of which `rowwise.cu` is a part, at first use and loads it. No torch headers: a plain C interface,
some seconds of nvcc."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("hop.cu")
ROWWISE = Path(__file__).with_name("rowwise.cu")
CACHE_VARIABLE = "AFDPATCH_KERNEL_CACHE"
NVCC_VARIABLE = "AFDPATCH_NVCC"
OLDEST = (9, 0)


class BuildError(RuntimeError):
    """The kernels can't be compiled or loaded: what was expected, what was found and what to do."""


class Launch(ctypes.Structure):
    """`Launch` of hop.cu, field by field; what each is stands there."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("source", "out", "own", "state", "record", "host", "trace")],
        ("deadline_ns", ctypes.c_uint64),
        ("payload_at", ctypes.c_uint64),
        *[
            (name, ctypes.c_uint32)
            for name in (
                "trace_length",
                "units",
                "blocks",
                "threads",
                "per_block",
                "layer",
                "micro_batch",
                "rows",
                "initiator",
                "mode",
                "packed",
                "gated",
                "overlap",
            )
        ],
    )


class Rowwise(ctypes.Structure):
    """`Rowwise` of rowwise.cu, field by field; what each is stands there."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("residual", "weight")],
        ("wire_at", ctypes.c_uint64),
        *[
            (name, ctypes.c_uint32)
            for name in ("form", "item", "hidden", "chunks", "units", "per_block", "packed", "gated")
        ],
        ("eps", ctypes.c_float),
    )


def nvcc() -> str:
    """The compiler: $AFDPATCH_NVCC, $CUDA_HOME/bin/nvcc, the one on the PATH, or /usr/local/cuda/bin/nvcc.

    Raises:
        BuildError: none of them is there.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for candidate in (os.environ.get(NVCC_VARIABLE), f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"):
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    raise BuildError(
        f"hop kernels: expected CUDA's compiler, found no nvcc; install it or set {NVCC_VARIABLE} or CUDA_HOME"
    )


def cache_folder() -> Path:
    """Where compiled kernels are kept: $AFDPATCH_KERNEL_CACHE, else afdpatch/kernels below the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "afdpatch" / "kernels"


def command(capability: tuple[int, int], target: Path, source: Path = SOURCE) -> list[str]:
    """The compiler's command line for a GPU of this compute capability.

    Raises:
        BuildError: the GPU is older than 9.0, or there is no compiler.
    """
    if capability < OLDEST:
        raise BuildError(
            f"hop kernels: expected a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or later, found "
            f"{capability[0]}.{capability[1]}; use another connector on this GPU"
        )
    number = f"{capability[0]}{capability[1]}"
    return [
        nvcc(),
        "-O3",
        "-std=c++17",
        "-shared",
        "-Xcompiler=-fPIC",
        "--cudart=shared",
        f"-gencode=arch=compute_{number},code=sm_{number}",
        str(source),
        "-o",
        str(target),
    ]


def build(capability: tuple[int, int]) -> Path:
    """The compiled library for a GPU of this compute capability; compiled if the cache hasn't it.

    The name holds a digest of sources, compiler and options, and the file appears at once and complete, so that
    processes may build at the same time.

    Raises:
        BuildError: no compiler, or it failed.
    """
    arguments = command(capability, Path("OUTPUT"))
    try:
        release = subprocess.run([arguments[0], "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"hop kernels: {arguments[0]} --version failed: {error}; set {NVCC_VARIABLE}") from error
    texts = [SOURCE.read_text(), ROWWISE.read_text(), release, *arguments]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]
    folder = cache_folder()
    library = folder / f"hop-{digest}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / "hop.so"
        done = subprocess.run(command(capability, target), capture_output=True, text=True)
        if done.returncode:
            raise BuildError(
                f"hop kernels: nvcc failed with {done.returncode}:\n{(done.stderr or done.stdout)[-2000:]}"
            )
        os.replace(target, library)
    return library


@functools.cache
def load(capability: tuple[int, int]) -> ctypes.CDLL:
    """The library, loaded once a process. torch with CUDA must be imported before (it brings the CUDA runtime).

    Raises:
        BuildError: it can't be built or loaded, or it disagrees with `Launch` or `Rowwise`.
    """
    path = build(capability)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"hop kernels: can't load {path}: {error}; remove it to have it built again") from error
    for structure, size in ((Launch, library.afd_hop_launch_bytes), (Rowwise, library.afd_hop_rowwise_bytes)):
        found, expected = size(), ctypes.sizeof(structure)
        if found != expected:
            raise BuildError(
                f"hop kernels: {structure.__name__}: expected {expected} bytes, found {found} in {path}; remove it"
            )
    library.afd_hop_error.restype = ctypes.c_char_p
    library.afd_hop_allocate.argtypes = (ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p))
    library.afd_hop_free.argtypes = (ctypes.c_void_p,)
    library.afd_hop_export.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.afd_hop_import.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
    library.afd_hop_unimport.argtypes = (ctypes.c_void_p,)
    library.afd_hop_reach.argtypes = (ctypes.c_int,)
    library.afd_hop_launch.argtypes = (ctypes.POINTER(Launch), ctypes.c_void_p)
    library.afd_hop_launch_rowwise.argtypes = (ctypes.POINTER(Launch), ctypes.POINTER(Rowwise), ctypes.c_void_p)
    return library

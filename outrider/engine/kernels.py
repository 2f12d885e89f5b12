"""The compiled kernels between a decoder layer's matrix products, for CPUs (`kernels.cpp`).

The package's installation compiles them where there is a C++ compiler; `available` says whether it did. Tensors are
handed over by address: every function here checks nothing, `FusedDecoder` gives it what it made itself.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

VERSION = 1  # of the functions' signatures; raised together with kernels_version() in kernels.cpp
HEAD_DIMS = (16, 32, 64, 128)
NUM_MEMBER_FIELDS = 6
MAX_QUERIES = 24

_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Shape(ctypes.Structure):
    """What is the same for every step of a layer."""

    _fields_ = (
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("rotary_half", _INT64),
        ("window", _INT64),  # keys seen, the row's own included; 0: all
        ("scale", _FLOAT),
        ("softcap", _FLOAT),  # 0: none
        ("norm_epsilon", _FLOAT),
    )


class Step(ctypes.Structure):
    """Addresses of a step's int32 arrays; `ragged.RaggedStep` keeps them alive."""

    _fields_ = (
        ("num_rows", _INT64),
        ("num_members", _INT64),
        ("positions", _POINTER),
        ("write_slots", _POINTER),
        ("members", _POINTER),
        ("tables", _POINTER),
        ("paths", _POINTER),
        ("block_size", _INT64),
    )


class Kernels:
    """The functions for one element type.

    add_rms_norm(residual, addend or None, weight, output, num_rows, width, epsilon): residual += addend, output =
    its root mean square norm (Zhang and Sennrich, 1910.07467).
    silu_mul(gate_up, output, num_rows, width): output = silu(gate) * up.
    rotate_and_store(qkv, step, shape, cosines, sines, query_norm, key_norm, keys, values): rotary embedding (Su et
    al., 2104.09864) of queries in place, of keys into the cache, values into the cache.
    attend(qkv, output, step, shape, keys, values, scores, stride, slots, first_member, last_member): attention over
    the paged cache; scores is room for MAX_QUERIES * stride floats, slots for stride int32.
    """

    def __init__(self, library: ctypes.PyDLL, dtype: str) -> None:
        self.add_rms_norm = library[f"add_rms_norm_{dtype}"]
        self.add_rms_norm.argtypes = [_POINTER] * 4 + [_INT64, _INT64, _FLOAT]
        self.silu_mul = library[f"silu_mul_{dtype}"]
        self.silu_mul.argtypes = [_POINTER, _POINTER, _INT64, _INT64]
        self.rotate_and_store = library[f"rotate_and_store_{dtype}"]
        self.rotate_and_store.argtypes = [_POINTER] * 9
        self.attend = library[f"attend_{dtype}"]
        self.attend.argtypes = [_POINTER] * 7 + [_INT64, _POINTER, _INT64, _INT64]
        for function in (self.add_rms_norm, self.silu_mul, self.rotate_and_store):
            function.restype = None
        self.attend.restype = ctypes.c_bool


@functools.cache
def _library() -> ctypes.PyDLL | None:
    """None where the installation found no compiler, or is older than this module."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        if not path.is_file():
            continue
        # PyDLL keeps the interpreter's lock: the calls are shorter than handing it over would take.
        library = ctypes.PyDLL(str(path))
        if library.kernels_version() == VERSION:
            return library
        logger.warning("%s is of another version; install Outrider again to have it compiled anew", path)
        return None
    return None


def available() -> bool:
    return _library() is not None


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The compiled kernels for a type, None where there are none."""
    library = _library()
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    return Kernels(library, names[dtype]) if library is not None and dtype in names else None

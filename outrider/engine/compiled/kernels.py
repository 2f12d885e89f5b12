"""The compiled CPU kernels: a decoder layer's between its matrix products (`kernels.cpp`, `attention.cpp`), the
products themselves and whole steps (`decode.cpp`).

The package's installation compiles them where there is a C++ compiler; `available` says whether it did. Tensors are
passed by address and nothing is checked here: `FusedDecoder` passes only what it made itself.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib.machinery
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

VERSION = 8  # of the signatures; change it together with kernels_version() in kernels.cpp
HEAD_DIMS = (16, 32, 64, 128)
NUM_MEMBER_FIELDS = 6
MAX_QUERIES = 24
MAX_LIKELY = 64

GROUP = 48
"""Outputs whose weights are stored together, pairs of inputs by pairs of inputs."""

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Shape(ctypes.Structure):
    """Parameters of a layer that are the same for every step."""

    _fields_ = (
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("rotary_half", _INT64),
        ("window", _INT64),  # keys visible to a row, its own included; 0: all
        ("instructions", _INT64),  # that attention uses: those of `attention_instructions`
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
        ("num_threads", _INT64),
    )


class Instructions(enum.IntEnum):
    """Processor instructions that multiply bfloat16, the fastest first. The numbers are those of `kernels.h`."""

    AVX512_BF16 = 1
    AVX2 = 2


class Matrix(ctypes.Structure):
    """Weights bfloat16 [num_groups, num_inputs / 2, GROUP, 2], zeros behind the last output; bias or None."""

    _fields_ = (
        ("weights", _POINTER),
        ("bias", _POINTER),
        ("num_inputs", _INT64),
        ("num_outputs", _INT64),
        ("instructions", _INT64),
    )


class Layer(ctypes.Structure):
    """One layer for `decode`."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "attention_norm", "query_norm", "key_norm")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        ("shape", Shape),
        ("keys", _POINTER),
        ("values", _POINTER),
    )


class Decoder(ctypes.Structure):
    """All of a model for `decode`. taps: int64 [num_taps], layers whose states are copied."""

    _fields_ = (
        ("layers", _POINTER),
        *((name, _INT64) for name in ("num_layers", "width", "intermediate", "attended_width")),
        ("embedding", _POINTER),
        ("norm", _POINTER),
        ("head", Matrix),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("epsilon", _FLOAT),
        ("taps", _POINTER),
        ("num_taps", _INT64),
    )


class Products:
    """Functions whose inputs are multiplied with bfloat16 weights by `instructions` of the processor.

    They take long enough to release the interpreter's lock.

    multiply(matrix, inputs, outputs, num_rows, num_threads): outputs = inputs @ weights + bias, all bfloat16.
    decode(decoder, step, token_ids, wanted or None, num_wanted, activations, scores, stride, slots, logits, tapped or
    None): a step; False for a token id outside the vocabulary, which is the head's number of outputs. token_ids and
    wanted are int64, activations room for num_rows times (3 * width + max(attended_width, intermediate) + max(qkv's
    outputs, 2 * intermediate)) bfloat16, logits float32 [num_wanted or num_rows, vocab], tapped bfloat16 [num_rows,
    num_taps, width].
    """

    def __init__(self, library: ctypes.CDLL, instructions: Instructions) -> None:
        self.instructions = instructions
        self.multiply = library.multiply_bfloat16
        self.multiply.argtypes = [_POINTER, _POINTER, _POINTER, _INT64, _INT32]
        self.multiply.restype = None
        self.decode = library.decode_bfloat16
        self.decode.argtypes = [_POINTER] * 4 + [_INT64, _POINTER, _POINTER, _INT64, *[_POINTER] * 3]
        self.decode.restype = ctypes.c_bool


class Kernels:
    """The functions for one element type.

    add_rms_norm(residual, addend or None, weight, output, num_rows, width, epsilon): residual += addend, output =
    its root mean square norm (Zhang and Sennrich, 1910.07467).
    silu_mul(gate_up, output, num_rows, width): output = silu(gate) * up.
    rotate_and_store(qkv, step, shape, cosines, sines, query_norm, key_norm, keys, values): rotary embedding (Su et
    al., 2104.09864) of queries in place, of keys into the cache, values into the cache.
    attend(qkv, output, step, shape, keys, values, scores, stride, slots, first_member, last_member): attention over
    the paged cache; scores is room for MAX_QUERIES * stride floats, slots for stride int32. With AVX512_BF16 (bfloat16
    alone, `attention.cpp`) the weights are rounded to bfloat16, as transformers does it, and prompts take 0.56 to
    0.58 of the time (`python -m benchmarks attention`).
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
    """Loads the compiled library; None where the installation found no compiler or is older than this module."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        if not path.is_file():
            continue
        try:
            # PyDLL keeps the interpreter's lock: the calls are shorter than releasing it would take.
            library = ctypes.PyDLL(str(path))
        except OSError as error:
            logger.warning("the compiled kernels cannot be loaded: %s", error)
            return None
        if library.kernels_version() == VERSION:
            return library
        logger.warning("%s has another version; reinstall Outrider to recompile it", path)
        return None
    return None


def available() -> bool:
    """Whether the compiled kernels can be used."""
    return _library() is not None


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The compiled kernels for a type; None where there are none."""
    library = _library()
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
    return Kernels(library, names[dtype]) if library is not None and dtype in names else None


@functools.cache
def products() -> Products | None:
    """The compiled products that workers use on this processor; None where they use oneDNN's or torch's.

    With AVX-512 BF16 they are faster than oneDNN's. With AVX2 they are faster than torch's, where oneDNN has none for
    bfloat16 (`python -m benchmarks step_cost`). With AMX oneDNN's products of many rows are far faster; then it
    computes all of them, since the rows of a model must have the same bits in any batch.
    """
    found = every_product()
    if torch.cpu._is_amx_tile_supported():
        return None
    if Instructions.AVX2 in found and Instructions.AVX512_BF16 not in found and has_onednn_products():
        return None  # AVX-512 without BF16, or AVX-NE-CONVERT: not compared
    return next(iter(found.values()), None)


@functools.cache
def every_product() -> Mapping[Instructions, Products]:
    """The products that this processor can compute, the fastest first; none without compiled kernels."""
    library = _library()
    if library is None:
        return {}
    library.has_instructions.argtypes = [_INT64]
    library.has_instructions.restype = ctypes.c_bool
    unlocked = ctypes.CDLL(library._name)
    return {each: Products(unlocked, each) for each in Instructions if library.has_instructions(each)}


def attention_instructions(dtype: torch.dtype) -> Instructions | None:
    """The instructions with which attention multiplies on this processor; None: those that every processor has."""
    has_dot_products = dtype == torch.bfloat16 and Instructions.AVX512_BF16 in every_product()
    return Instructions.AVX512_BF16 if has_dot_products else None


def has_onednn_products() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def most_likely() -> Any:
    """most_likely(logits, num_rows, width, count, indices, chances) for float32 rows; None where it is not compiled.

    indices int64 and chances float32 (or None) [num_rows, count], count at most MAX_LIKELY: after a softmax the
    likeliest first, among equals the first.
    """
    library = _library()
    if library is None:
        return None
    function = library.most_likely_float32
    function.argtypes = [_POINTER, _INT64, _INT64, _INT64, _POINTER, _POINTER]
    function.restype = None
    return function


@functools.cache
def coupled_choices() -> Any:
    """coupled_choices(probs, num_rows, width, keys, count, choices, shares) for float32 rows; None where it is not
    compiled.

    keys uint64 [num_rows]; choices int64 [num_rows, count]: each row's tokens with the greatest of its
    `sampling.keyed_scores`, in falling order, of equals the first; at most `MAX_LIKELY`. Where fewer have a positive
    number, 0 follows. shares float32 of the same shape, or None: theirs of the sum of all scores, in which those of
    unlikely tokens are put too high. It takes long enough to release the interpreter's lock.
    """
    library = _library()
    if library is None:
        return None
    function = ctypes.CDLL(library._name).coupled_choices_float32
    function.argtypes = [_POINTER, _INT64, _INT64, _POINTER, _INT64, _POINTER, _POINTER]
    function.restype = None
    return function

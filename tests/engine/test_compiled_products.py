"""Tests of oneDNN products: memory for compiled kernels is bounded, and trying a form copies no weight to float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.compiled.kernels import has_onednn_products
from outrider.engine.compiled.products import PRODUCT_BYTES, PRODUCTS_MAX
from outrider.engine.layers.linear import LinearForm, is_batch_invariant
from outrider.engine.loading import memory_plan
from outrider.engine.loading.memory_plan import ServingShape, plan_memory
from tests import models

ROOT = Path(__file__).parents[2]

MULTIPLY_IN_MANY_SHAPES = """
import ctypes, gc, torch
from torch import nn
from outrider.engine.layers.linear import PackedLinear
from outrider.engine.compiled.products import bound_products
from tests.engine.test_tensor_parallel import own_memory_mib

def settled():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return own_memory_mib()

bound_products()
torch.set_num_threads(1)
with torch.inference_mode():
    inputs = torch.randn(512, 64).bfloat16()
    layers = [PackedLinear(nn.Linear(64, n, bias=False, dtype=torch.bfloat16), 64) for n in (64, 128, 192)]
    for layer in layers:
        layer(inputs[:1])
    before = settled()
    for num_rows in range(2, 513):
        for layer in layers:
            layer(inputs[:num_rows])
    print(settled() - before)
"""


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returned while it was active."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for each in answer if isinstance(answer, tuple | list) else (answer,):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                self.num_bytes = max(self.num_bytes, each.numel() * each.element_size())
        return answer


def test_trying_a_form_makes_no_tensor_larger_than_the_weight() -> None:
    """An output layer of 128,000 words in float32, several times over, took more than the rest of a model."""
    weighty = nn.Linear(512, 16_384, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    with LargestTensor() as largest:
        assert is_batch_invariant(LinearForm("its shape alone", _Zeros), weighty, row_counts=(2, 3))
    assert largest.num_bytes <= weighty.weight.numel() * 2


class _Zeros(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.new_zeros(inputs.shape[0], self.out_features)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or not has_onednn_products(), reason="oneDNN's bfloat16 and /proc are needed"
)
def test_what_onednn_compiles_takes_no_more_than_is_counted() -> None:
    words = [sys.executable, "-c", MULTIPLY_IN_MANY_SHAPES]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < PRODUCTS_MAX * PRODUCT_BYTES / 2**20


def test_a_plan_counts_what_onednn_compiles_where_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    def process_bytes(dtype: torch.dtype = torch.bfloat16, **shape: Any) -> int:
        return plan_memory(models.model_dir("llama"), ServingShape(dtype, **shape)).process

    monkeypatch.setattr(memory_plan, "has_onednn_products", lambda: True)
    monkeypatch.setattr(memory_plan, "products", object)
    with_own_products = process_bytes()
    monkeypatch.setattr(memory_plan, "products", lambda: None)
    assert process_bytes() - with_own_products == PRODUCTS_MAX * PRODUCT_BYTES
    assert process_bytes(torch.float32) == with_own_products
    on_gpu = process_bytes(device_type="cuda")
    monkeypatch.setattr(memory_plan, "products", object)
    assert on_gpu == process_bytes(device_type="cuda")
    monkeypatch.setattr(memory_plan, "products", lambda: None)
    monkeypatch.setattr(memory_plan, "has_onednn_products", lambda: False)
    assert process_bytes() == with_own_products

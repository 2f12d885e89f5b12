"""Adapts quantized checkpoints to transformers' loader, so that it builds an ordinary model from them.

transformers asks a quantizer, found by name, which tensors make up a weight. Ours takes the format from
`checkpoint_formats`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import torch
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from outrider.engine.loading.checkpoint_formats import CheckpointFormat, checkpoint_format

_NAME: Final = "outrider"


def read_as_plain(hf_config: Any) -> CheckpointFormat | None:
    """Changes the configuration of a quantized checkpoint so that `from_pretrained` reads it into plain layers.

    Returns its format, None where nothing is quantized. Raises ValueError naming a format that cannot be read.
    """
    described = getattr(hf_config, "quantization_config", None)
    if described is None:
        return None
    found = checkpoint_format(described)
    hf_config.quantization_config = {"quant_method": _NAME, "described": dict(described)}
    return found


@register_quantization_config(_NAME)
class _Config(QuantizationConfigMixin):
    def __init__(self, described: dict[str, Any], **_: Any) -> None:
        self.quant_method = _NAME
        self.described = described
        self.dequantize = True  # so that transformers afterwards treats the model as unquantized


@register_quantizer(_NAME)
class _Quantizer(HfQuantizer):
    requires_calibration = True  # it only reads and quantizes nothing

    def __init__(self, quantization_config: _Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.format = checkpoint_format(quantization_config.described)
        self.dtype = torch.get_default_dtype()
        self.failures: list[str] = []

    def __deepcopy__(self, _: object) -> _Quantizer:
        return self  # the loader copies an operation per weight, and with it the object it reports to

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    @property
    def serialized_names(self) -> dict[str, list[str]]:
        return {"weight": list(self.format.tensor_names)}

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        return {"dequantize": _Read}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.failures:
            raise ValueError(f"{len(self.failures)} weights cannot be read, such as {self.failures[0]}")
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Read(ConversionOps):
    """Reads the weights of one layer, or of each of a layer's experts."""

    def __init__(self, hf_quantizer: _Quantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, torch.Tensor | list[torch.Tensor]],
        full_layer_name: str,
        **_: Any,
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Takes tensors by the patterns of their names and returns weights by the patterns of theirs."""
        try:
            return self._read(input_dict, full_layer_name)
        except (
            KeyError,
            ValueError,
            RuntimeError,
        ) as error:  # transformers would report a code location instead
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            self.hf_quantizer.failures.append(f"{full_layer_name} ({reason})")
            return {}

    def _read(
        self, input_dict: dict[str, torch.Tensor | list[torch.Tensor]], full_layer_name: str
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        tensors: dict[str, dict[str, list[torch.Tensor]]] = defaultdict(dict)
        for pattern, found in input_dict.items():
            prefix, dot, name = pattern.rpartition(".")
            tensors[prefix + dot][name] = found if isinstance(found, list) else [found]
        weights: dict[str, torch.Tensor | list[torch.Tensor]] = {}
        for prefix, by_name in tensors.items():
            each = [
                self.hf_quantizer.format.read(dict(zip(by_name, parts, strict=True))).to(self.hf_quantizer.dtype)
                for parts in zip(*by_name.values(), strict=True)
            ]
            weights[f"{prefix}weight" if prefix else full_layer_name] = each if prefix else each[0]
        return weights

"""A Llama-like decoder in few operations: the CPU's fast path beside transformers' own module code.

Each layer is four matrix products (query, key and value in one; gate and up in one) in the batch-invariant forms of
`linear`, with four compiled kernels between them (`kernels`); where the products are compiled too, a step is one call.
The cost beyond matrix products is then small even for models of a few million parameters, which are otherwise bound by
the interpreter. Weights are transformers' own, taken from the loaded model; rotary tables come from its rotary
embedding, so that every static scaling of it works. `load_model` compares the result with transformers' as for any
other model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outrider.engine.compiled import kernels as compiled
from outrider.engine.compiled.kernels import (
    HEAD_DIMS,
    MAX_QUERIES,
    NUM_MEMBER_FIELDS,
    Kernels,
    Shape,
    Step,
    attention_instructions,
    kernels,
)
from outrider.engine.layers.attention import QueryBlock
from outrider.engine.layers.linear import CompiledLinear, LinearForms
from outrider.engine.layers.plain_linear import linear_of

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOVING_ROPE_TYPES = ("dynamic", "longrope")
NEVER_TREE = np.iinfo(np.int32).max


def why_not(model: Any) -> str | None:
    """The reason why `model` cannot run here; None when it can."""
    name = type(model).__name__
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    if model.device.type != "cpu":
        return f"the kernels are for CPUs, the model is on {model.device}"
    if kernels(model.dtype) is None:
        return "the kernels are not compiled: install Outrider where there is a C++ compiler"
    if model.config.hidden_act != "silu":
        return f"its activation is {model.config.hidden_act}, not silu"
    rope_type = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in MOVING_ROPE_TYPES:
        return f"its {rope_type} rotary frequencies depend on the sequence length"
    head_dim = model.model.layers[0].self_attn.head_dim
    if head_dim not in HEAD_DIMS:
        return f"its heads are {head_dim} wide, not one of {', '.join(map(str, HEAD_DIMS))}"
    return None


class RaggedStep:
    """A step's rows and the keys each of them sees, in the kernels' format."""

    def __init__(self, blocks: Sequence[QueryBlock], block_size: int) -> None:
        positions: list[int] = []
        write_slots: list[int] = []
        members: list[int] = []
        tables: list[int] = []
        paths: list[int] = []
        self.num_keys_max = 1
        self.num_members = 0
        table: Sequence[int] = ()
        table_start = 0
        for block in blocks:
            if block.kv.block_ids is not table:  # nodes of a tree stand beside the line that they follow
                table, table_start = block.kv.block_ids, len(tables)
                tables += table
            first = block.kv.length - block.num_rows
            write_slots += [
                table[entry // block_size] * block_size + entry % block_size for entry in range(first, block.kv.length)
            ]
            if block.paths is None:
                members += (len(positions), block.num_rows, first, table_start, NEVER_TREE, 0)
                positions += range(first, block.kv.length)
                self.num_members += 1
                self.num_keys_max = max(self.num_keys_max, block.kv.length)
                continue
            for path in block.paths:
                position = block.tree_start + len(path) - 1
                members += (len(positions), 1, position, table_start, block.tree_start, len(paths))
                positions.append(position)
                paths += path
                self.num_keys_max = max(self.num_keys_max, position + 1)
            self.num_members += len(block.paths)
        assert len(members) == NUM_MEMBER_FIELDS * self.num_members
        self.num_rows = len(positions)
        # All arrays in one buffer, which lives as long as this object.
        parts = (positions, write_slots, members, tables, paths)
        self._numbers: npt.NDArray[np.int32] = np.array([n for part in parts for n in part], dtype=np.int32)
        address = self._numbers.ctypes.data
        addresses = []
        for part in parts:
            addresses.append(address)
            address += 4 * len(part)
        self.struct = Step(self.num_rows, self.num_members, *addresses, block_size, torch.get_num_threads())


@dataclass(slots=True)
class TakenLayer:
    """One layer's weights, and the addresses that its kernels are called with."""

    input_norm: torch.Tensor
    attention_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    qkv: nn.Module
    output: nn.Module
    gate_up: nn.Module
    down: nn.Module
    shape: Shape
    keys: torch.Tensor  # this layer's cache, [num_slots, num_kv_heads, head_dim]
    values: torch.Tensor

    def products(self) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        return self.qkv, self.output, self.gate_up, self.down

    def as_struct(self) -> compiled.Layer:
        """The layer for compiled products; the addresses stay those of this object's tensors."""
        return compiled.Layer(
            *(self.input_norm.data_ptr(), self.attention_norm.data_ptr()),
            *(_address(self.query_norm), _address(self.key_norm)),
            *(cast(CompiledLinear, each).matrix for each in self.products()),
            *(self.shape, self.keys.data_ptr(), self.values.data_ptr()),
        )


class FusedDecoder:
    """Runs steps with the weights of a loaded model, which it takes out of the model's layers."""

    def __init__(
        self,
        model: Any,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        num_positions: int,
        block_size: int,
        forms: LinearForms,
    ) -> None:
        found = kernels(model.dtype)
        assert found is not None, "why_not was not asked"
        self._kernels: Kernels = found
        self._block_size = block_size
        body = model.model
        self._embed: nn.Module = body.embed_tokens
        self._embedding: torch.Tensor = body.embed_tokens.weight
        self._norm: torch.Tensor = body.norm.weight
        self._epsilon: float = body.norm.variance_epsilon
        self._width: int = model.config.hidden_size
        self._intermediate: int = body.layers[0].mlp.gate_proj.out_features  # of this rank
        cosines, sines = body.rotary_emb(torch.zeros(1), torch.arange(num_positions).unsqueeze(0))
        half = cosines.shape[-1] // 2
        self._cosines = cosines[0, :, :half].float().contiguous()
        self._sines = sines[0, :, :half].float().contiguous()
        self._layers = []
        for index, (keys, values) in enumerate(caches):
            self._layers.append(take_layer(body.layers[index], keys, values, half, forms))
            body.layers[index] = nn.Identity()  # releases its weights
        model.lm_head = forms.build(model.lm_head, is_output=True)
        self._model = model
        shape = self._layers[0].shape
        self._attended_width = shape.num_heads * shape.head_dim
        self._taps = np.empty(0, dtype=np.int64)
        self._whole = self._as_one_call()
        self._scratch_stride = 0
        self._scores: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)
        self._slots: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Makes `forward` copy these hidden states, which `taps` numbers."""
        self._taps = np.array(layer_ids, dtype=np.int64)
        self._whole = self._as_one_call()

    def forward(
        self,
        token_ids: torch.Tensor,
        blocks: Sequence[QueryBlock],
        wanted: torch.Tensor | None,
        tapped: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of rows `wanted` (all, if None) of a flat step.  # [num_rows] int64 -> [num_wanted, vocab_size]

        tapped: filled with the tapped states.  # [num_rows, num_taps, width]
        """
        step = RaggedStep(blocks, self._block_size)
        self._make_room(step.num_keys_max)
        if self._whole is not None:
            return self._decode(self._whole, step, token_ids, wanted, tapped)
        num_rows = step.num_rows
        residual = self._embed(token_ids)
        normed = torch.empty_like(residual)
        attended = residual.new_empty(num_rows, self._attended_width)
        activated = residual.new_empty(num_rows, self._intermediate)
        # Addresses are taken once, because they do not change within the step.
        residual_at, normed_at = residual.data_ptr(), normed.data_ptr()
        attended_at, activated_at = attended.data_ptr(), activated.data_ptr()
        step_at = ctypes.addressof(step.struct)
        scores_at, slots_at, stride = self._scores.ctypes.data, self._slots.ctypes.data, self._scratch_stride
        cosines_at, sines_at = self._cosines.data_ptr(), self._sines.data_ptr()
        add_rms_norm, silu_mul = self._kernels.add_rms_norm, self._kernels.silu_mul
        rotate_and_store, attend = self._kernels.rotate_and_store, self._kernels.attend
        width, epsilon = self._width, self._epsilon
        addend: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            shape_at = ctypes.addressof(layer.shape)
            keys_at, values_at = layer.keys.data_ptr(), layer.values.data_ptr()
            addend_at = None if addend is None else addend.data_ptr()
            add_rms_norm(residual_at, addend_at, layer.input_norm.data_ptr(), normed_at, num_rows, width, epsilon)
            self._copy_tapped(index, residual, tapped)
            qkv = layer.qkv(normed)
            qkv_at = qkv.data_ptr()
            rotate_and_store(
                *(qkv_at, step_at, shape_at, cosines_at, sines_at),
                *(_address(layer.query_norm), _address(layer.key_norm), keys_at, values_at),
            )
            attend(
                *(qkv_at, attended_at, step_at, shape_at, keys_at, values_at),
                *(scores_at, stride, slots_at, 0, step.num_members),
            )
            addend = layer.output(attended)
            add_rms_norm(
                *(residual_at, addend.data_ptr(), layer.attention_norm.data_ptr(), normed_at),
                *(num_rows, width, epsilon),
            )
            gate_up = layer.gate_up(normed)
            silu_mul(gate_up.data_ptr(), activated_at, num_rows, self._intermediate)
            addend = layer.down(activated)
        assert addend is not None
        add_rms_norm(residual_at, addend.data_ptr(), self._norm.data_ptr(), normed_at, num_rows, width, epsilon)
        self._copy_tapped(len(self._layers), normed, tapped)
        logits: torch.Tensor = self._model.lm_head(normed if wanted is None else normed.index_select(0, wanted))
        return logits

    def _copy_tapped(self, index: int, states: torch.Tensor, tapped: torch.Tensor | None) -> None:
        if tapped is not None:
            for i in np.flatnonzero(self._taps == index):
                tapped[:, i] = states

    def _as_one_call(self) -> compiled.Decoder | None:
        """The model in the format of `decode`; None where some product is not a compiled one."""
        products = [each for layer in self._layers for each in layer.products()]
        if not all(type(each) is CompiledLinear for each in (*products, self._model.lm_head)):
            return None
        layers = (compiled.Layer * len(self._layers))(*(layer.as_struct() for layer in self._layers))
        self._layer_structs = layers  # kept alive
        widest = max(cast(CompiledLinear, layer.qkv).matrix.num_outputs for layer in self._layers)
        self._activation_width = (
            3 * self._width + max(self._attended_width, self._intermediate) + max(widest, 2 * self._intermediate)
        )
        return compiled.Decoder(
            *(ctypes.addressof(layers), len(layers), self._width, self._intermediate, self._attended_width),
            *(self._embedding.data_ptr(), self._norm.data_ptr(), self._model.lm_head.matrix),
            *(self._cosines.data_ptr(), self._sines.data_ptr(), self._epsilon),
            *(self._taps.ctypes.data, len(self._taps)),
        )

    def _decode(
        self,
        decoder: compiled.Decoder,
        step: RaggedStep,
        token_ids: torch.Tensor,
        wanted: torch.Tensor | None,
        tapped: torch.Tensor | None,
    ) -> torch.Tensor:
        products = compiled.products()
        assert products is not None
        room = torch.empty(step.num_rows * self._activation_width, dtype=torch.bfloat16)
        num_wanted = step.num_rows if wanted is None else wanted.shape[0]
        logits = torch.empty(num_wanted, decoder.head.num_outputs)
        is_done = products.decode(
            *(ctypes.addressof(decoder), ctypes.addressof(step.struct), token_ids.data_ptr()),
            *(_address(wanted), num_wanted, room.data_ptr()),
            *(self._scores.ctypes.data, self._scratch_stride, self._slots.ctypes.data, logits.data_ptr()),
            _address(tapped),
        )
        if not is_done:
            raise IndexError(f"a token id is outside the vocabulary of {decoder.head.num_outputs}")
        return logits

    def _make_room(self, num_keys: int) -> None:
        if num_keys > self._scratch_stride:
            self._scratch_stride = max(2 * self._scratch_stride, -(-num_keys // 1024) * 1024)
            self._scores = np.empty(MAX_QUERIES * self._scratch_stride, dtype=np.float32)
            self._slots = np.empty(self._scratch_stride, dtype=np.int32)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _window(attention: Any) -> int | None:
    """Keys that a layer's rows see. Qwen sets it per layer, Mistral for all; Llama has none, whatever its file says."""
    if hasattr(attention, "sliding_window"):
        found: int | None = attention.sliding_window
    else:
        found = attention.config.sliding_window if attention.config.model_type == "mistral" else None
    return found


def take_layer(
    layer: Any, keys: torch.Tensor, values: torch.Tensor, rotary_half: int, forms: LinearForms
) -> TakenLayer:
    """The layer's weights in the forms that `forms` builds, over its cache (keys and values)."""
    attention, mlp = layer.self_attn, layer.mlp
    num_kv_heads, head_dim = keys.shape[1], keys.shape[2]
    query_norm = getattr(attention, "q_norm", None)
    key_norm = getattr(attention, "k_norm", None)
    shape = Shape(
        num_heads=attention.q_proj.out_features // head_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_half=rotary_half,
        window=_window(attention) or 0,
        instructions=attention_instructions(keys.dtype) or 0,
        scale=attention.scaling,
        softcap=0.0,
        norm_epsilon=0.0 if query_norm is None else query_norm.variance_epsilon,
    )
    return TakenLayer(
        input_norm=layer.input_layernorm.weight,
        attention_norm=layer.post_attention_layernorm.weight,
        query_norm=None if query_norm is None else query_norm.weight,
        key_norm=None if key_norm is None else key_norm.weight,
        qkv=forms.build(_joined(attention.q_proj, attention.k_proj, attention.v_proj)),
        output=forms.build(attention.o_proj),
        gate_up=forms.build(_joined(mlp.gate_proj, mlp.up_proj)),
        down=forms.build(mlp.down_proj),
        shape=shape,
        keys=keys,
        values=values,
    )


def _joined(*linears: nn.Linear) -> nn.Linear:
    """Returns one layer whose output is theirs side by side."""
    weight, bias = torch.cat([linear.weight for linear in linears]), None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([
            weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears
        ])  # fmt: skip
    return linear_of(weight, bias)

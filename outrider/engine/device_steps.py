"""Steps on a GPU: small ones as CUDA graphs, others kernel by kernel, both with the same kernels.

A decoding step of a large model is some hundred short kernels, and launching them one by one takes longer than they
run. A graph is captured once for each of a few shapes (`PagedShape`) and launched as a whole for every step that fits
the shape; what differs between steps lies in one array of numbers on the device. Models that read their own results on
the way (experts, chosen per row) cannot be captured and run kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.layers.attention import LayerCache, attending
from outrider.engine.layers.features import ModuleTaps
from outrider.engine.layers.paged_attention import Attend, PagedStep, window_of
from outrider.engine.layers.paged_layout import PagedPlan, PagedShape, plan_paged
from outrider.engine.sequence_chunk import SequenceChunk

logger = logging.getLogger(__name__)

GRAPH_ROWS: Final = (8, 16, 32, 64, 128)
"""Row counts of the steps that become graphs; larger steps are bound by arithmetic, and each graph takes memory."""


@dataclass(slots=True)
class _Graph:
    numbers: torch.Tensor  # int32 [shape.size], read by the graph
    logits: torch.Tensor  # float32 [num_rows, vocab_size], written by it
    replay: Callable[[], None]
    tapped: torch.Tensor | None  # [num_rows, num_taps, width], written by it


class DeviceSteps:
    """Runs a model whose attention is `outrider` and whose layers `why_not_paged` permits."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[LayerCache],
        block_size: int,
        scratch_block_ids: Sequence[int],
        longest: int,
        attend: Attend,
    ) -> None:
        """longest: the most KV entries of a sequence."""
        self._model, self._layers, self._block_size, self._attend = model, layers, block_size, attend
        self._windows = [None if layer.visibility is None else window_of(layer.visibility, longest) for layer in layers]
        self._scratch_block_ids = scratch_block_ids
        num_scratch_entries = len(scratch_block_ids) * block_size
        self._shapes = [
            PagedShape(num_rows, num_rows + 1, -(-longest // block_size), num_copies)
            for num_rows in GRAPH_ROWS
            for num_copies in sorted({0, num_scratch_entries})
        ]
        self._graphs: dict[PagedShape, _Graph] = {}
        self._taps: ModuleTaps | None = None

    def tap(self, taps: ModuleTaps) -> None:
        """Makes `forward` copy the states that `taps` keeps; captures the graphs anew if there are any."""
        self._taps = taps
        if self._graphs:
            self._graphs = {}
            self.capture()

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[SequenceChunk], wanted: Sequence[int], tapped: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Returns float32 logits of the rows `wanted`, [len(wanted), vocab_size]; None where the step does not fit.

        tapped: filled with the tapped states.  # [num_rows, num_taps, width]
        """
        plan = plan_paged(
            [chunk.query_block() for chunk in chunks],
            [token_id for chunk in chunks for token_id in chunk.token_ids],
            wanted,
            self._block_size,
            self._scratch_block_ids,
        )
        if plan is None:
            return None
        least = plan.shape
        shape = next((each for each in self._graphs if each.holds(least)), None)
        if shape is None:
            logits, states = self._run(self._upload(plan.write_down(least)), least, len(wanted))
            _copy(states, tapped)
            return logits
        graph = self._graphs[shape]
        graph.numbers.copy_(self._upload(plan.write_down(shape)))
        graph.replay()
        _copy(graph.tapped, tapped)
        return graph.logits[: len(wanted)].clone()  # the next step overwrites them

    def capture(self) -> None:
        """Captures the graphs. Raises RuntimeError where the model cannot be captured."""
        pool = torch.cuda.graph_pool_handle()
        for shape in reversed(self._shapes):  # the largest first: the others fit into its memory pool
            numbers = self._upload(empty_step(shape))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.inference_mode(), torch.cuda.stream(side):
                # Libraries allocate their workspaces at the first call.
                self._run(numbers, shape, shape.num_rows)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
                logits, tapped = self._run(numbers, shape, shape.num_rows)
            self._graphs[shape] = _Graph(numbers, logits, graph.replay, tapped)
        self._graphs = {shape: self._graphs[shape] for shape in self._shapes}  # the smallest first
        logger.info("steps of up to %d rows are CUDA graphs", GRAPH_ROWS[-1])

    def _run(
        self, numbers: torch.Tensor, shape: PagedShape, num_wanted: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        step = PagedStep(numbers, shape, self._layers, self._windows, self._block_size, self._attend)
        with attending(step):
            logits: torch.Tensor = self._model(
                input_ids=step.token_ids.unsqueeze(0),
                position_ids=step.positions,
                use_cache=False,
                logits_to_keep=step.wanted[:num_wanted],
            ).logits
        assert step.num_calls == len(self._layers), "some layers did not attend through the paged cache"
        return logits[0].float(), None if self._taps is None else self._taps.take()

    def _upload(self, numbers: npt.NDArray[np.int32]) -> torch.Tensor:
        tensor = torch.from_numpy(numbers)
        device = self._layers[0].keys.device
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _copy(states: torch.Tensor | None, tapped: torch.Tensor | None) -> None:
    if states is not None and tapped is not None:
        tapped.copy_(states[: tapped.shape[0]])


def empty_step(shape: PagedShape) -> npt.NDArray[np.int32]:
    """Returns a step that is all padding."""
    return PagedPlan([], [], [], [], [], []).write_down(shape)

"""What a request asks of sampling, checked. Pure; shared by every process."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from outrider.errors import InvalidRequest
from protos.outrider.v1 import common_pb2

MAX_STOP_TOKEN_IDS = 64
MAX_SPECULATIVE_TOKENS = 32


class DecodingMode(enum.Enum):
    """How committed tokens are decided (design section 5)."""

    GREEDY = common_pb2.DECODING_MODE_GREEDY
    REJECTION = common_pb2.DECODING_MODE_REJECTION
    COUPLED = common_pb2.DECODING_MODE_COUPLED


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked on construction; raises InvalidRequest, which names the field and its range."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "0 to 2")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1")
        _check("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 keeps all)")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 to 1")
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed < 2**64, "0 to 2^64 - 1")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            num = len(self.stop_token_ids)
            raise InvalidRequest(
                "stop_token_ids", f"stop_token_ids has {num} entries; permitted: at most {MAX_STOP_TOKEN_IDS}"
            )

    @property
    def decoding_mode(self) -> DecodingMode:
        if self.temperature == 0.0:
            return DecodingMode.GREEDY
        return DecodingMode.REJECTION if self.seed is None else DecodingMode.COUPLED

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> SamplingParams:
        return cls(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            min_p=message.min_p,
            seed=message.seed if message.HasField("seed") else None,
            max_tokens=message.max_tokens,
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
        )

    def to_proto(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=sorted(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


def _check(name: str, value: float, holds: bool, permitted: str) -> None:
    if not holds or not math.isfinite(value):
        raise InvalidRequest(name, f"{name} is {value:g}; permitted: {permitted}")

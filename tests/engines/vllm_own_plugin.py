"""A plugin of pytest, in vLLM's environment, under which vLLM's own tests ask a server that runs already.

It is loaded on its own, by path: in that process `tests` is vLLM's package. The server serves every model name that
the tests ask for, by one small model; flags that a test would start its server with have no effect.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import openai
import vllm.tokenizers
import vllm.transformers_utils.repo_utils

URL = os.environ["OUTRIDER_OWN_TESTS_URL"]
MODEL = os.environ["OUTRIDER_OWN_TESTS_MODEL"]
OUTCOMES = Path(os.environ["OUTRIDER_OWN_TESTS_OUTCOMES"])
TIMEOUT_S = 60.0


class RemoteOpenAIServer:
    """In the place of the class that starts a server."""

    DUMMY_API_KEY = "token-abc123"
    url_root = URL

    def __init__(self, model: str, vllm_serve_args: list[str], **_: Any) -> None:
        pass

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": TIMEOUT_S}
        return own | options


def of_small_model(get_tokenizer: Any) -> Any:
    return lambda _, *args, **options: get_tokenizer(MODEL, *args, **options)


vllm.tokenizers.get_tokenizer = of_small_model(vllm.tokenizers.get_tokenizer)
vllm.transformers_utils.repo_utils.hf_api = lambda: types.SimpleNamespace(snapshot_download=lambda **_: "")
utils = types.ModuleType("tests.utils")
vars(utils)["RemoteOpenAIServer"] = RemoteOpenAIServer
sys.modules["tests.utils"] = utils
outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    OUTCOMES.write_text(json.dumps(outcomes))

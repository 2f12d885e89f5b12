"""The shipped pair loads offline, fits its budget, and shares one tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import demo
from demo import checkpoints, corpus

DEMO = Path(demo.__file__).parent
MAX_BYTES = 40_000_000

pytestmark = pytest.mark.skipif(
    not all((DEMO / name / "model.safetensors").exists() for name in ("target", "draft")),
    reason="no trained pair here",
)


@pytest.mark.parametrize(
    ("name", "config"), [("target", checkpoints.target_config()), ("draft", checkpoints.draft_config())]
)
def test_model_loads_and_has_the_documented_shape(name: str, config: LlamaConfig) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.bfloat16, local_files_only=True)
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    ):
        assert getattr(model.config, field) == getattr(config, field)
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.isfinite().all()


def test_pair_has_all_its_files_and_is_small_enough() -> None:
    names = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    total = 0
    for folder in (DEMO / "target", DEMO / "draft"):
        assert names <= {path.name for path in folder.iterdir()}
        total += sum(path.stat().st_size for path in folder.iterdir())
    assert total <= MAX_BYTES


def test_tokenizers_are_identical() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (DEMO / "target" / name).read_bytes() == (DEMO / "draft" / name).read_bytes()


def test_tokenizer_round_trips_any_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target", local_files_only=True)
    text = "def größe(x):\n\treturn x ** 2  # 数\r\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 4096
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_chat_is_shown_to_the_model_as_source() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target", local_files_only=True)
    messages = [
        {"role": "system", "content": "Tools."},
        {"role": "user", "content": "read a file\nline by line"},
        {"role": "assistant", "content": "open(path)"},
        {"role": "user", "content": [{"type": "text", "text": "close it"}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = '<|bos|>"""Tools."""\n\n# read a file\n# line by line\nopen(path)\n\n# close it\n'
    assert text == expected


def test_target_learned_python() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32, local_files_only=True)
    prompts = corpus.held_out_prompts(4)
    with torch.inference_mode():
        losses = []
        for prompt in prompts:
            ids = torch.tensor([tokenizer(prompt).input_ids])
            losses.append(model(ids, labels=ids).loss.item())
    mean = sum(losses) / len(losses)
    assert mean < 5, f"held-out loss {mean:.2f}; an untrained model has 8.3"


def test_tokenizer_config_names_no_machine() -> None:
    for folder in (DEMO / "target", DEMO / "draft"):
        for path in folder.glob("*.json"):
            settings = json.loads(path.read_text())
            assert "_name_or_path" not in settings
            assert not [value for value in settings.values() if isinstance(value, str) and value.startswith("/")]

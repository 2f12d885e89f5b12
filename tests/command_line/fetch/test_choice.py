"""Which files of a model are needed, and which models are refused."""

from __future__ import annotations

import pytest

from command_line.fetch import choice
from command_line.fetch.sources import Listing, SourceFile
from outrider.errors import ConfigurationError
from tests.command_line.fetch.checkpoints import NEEDED, SHARDS, sharded_model

INDEX = "model.safetensors.index.json"


def listed(*paths: str) -> Listing:
    return Listing(None, tuple(SourceFile(path, len(path), path) for path in paths))


def test_descriptions_are_what_a_tokenizer_and_a_configuration_are_made_of() -> None:
    everything = listed(*sharded_model(), "tokenizer.model", "qwen.tiktoken", "tiktoken.model", "vocab.txt")
    found = {file.path for file in choice.descriptions(everything)}
    assert found == (NEEDED - set(SHARDS)) | {"tokenizer.model", "qwen.tiktoken", "tiktoken.model", "vocab.txt"}


@pytest.mark.parametrize(
    "paths",
    [
        ("config.json", "model.safetensors"),
        ("config.json", INDEX, *SHARDS, "pytorch_model.bin"),
        ("config.json", "other.safetensors"),  # which config.json may name
    ],
)
def test_what_can_be_served_is_not_refused(paths: tuple[str, ...]) -> None:
    choice.refuse_unservable(listed(*paths), "x")


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ((), "x has no files"),
        (("config.json", "pytorch_model.bin"), r"only pickled weights \(\*\.bin\).*refs/pr/NUMBER"),
        (("config.json", "a.pth"), r"only pickled weights \(\*\.pth\)"),
        (("README.md", "model-Q4.gguf"), "only GGUF"),
        (("config.json", "README.md"), "no safetensors weights; name a repository"),
        (("params.json", "consolidated.safetensors"), r"has consolidated\.safetensors, but no config\.json"),
        (("config.json", "consolidated.safetensors"), r"but no model\.safetensors"),
        (("adapter_config.json", "adapter_model.safetensors"), r"but no config\.json"),
        (("README.md", "small/config.json", "small/model.safetensors"), r"no config\.json of its own, but small/"),
        (("config.json", "onnx/model.safetensors"), r"has onnx/model\.safetensors, but no model\.safetensors"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(paths: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        choice.refuse_unservable(listed(*paths), "x")


def test_weights_are_those_that_are_named_the_largest_first() -> None:
    listing = Listing(
        None, tuple(SourceFile(f"{name}.safetensors", size, "") for name, size in zip("abc", (1, 3, 2), strict=True))
    )
    found = choice.weights(listing, ["a.safetensors", "b.safetensors"], "x")
    assert [file.path for file in found] == ["b.safetensors", "a.safetensors"]


def test_an_adapter_beside_the_weights_is_needed_too() -> None:
    listing = listed("config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors")
    found = {file.path for file in choice.weights(listing, ["model.safetensors"], "x")}
    assert found == {"model.safetensors", "adapter_model.safetensors"}
    assert "adapter_config.json" in {file.path for file in choice.descriptions(listing)}


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "sub/model.safetensors", "weights.bin"])
def test_an_index_that_names_files_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no safetensors file beside it|no file inside of it"):
        choice.weights(listed("config.json", name), [name], "x")

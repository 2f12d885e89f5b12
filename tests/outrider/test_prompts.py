"""Prompts are what transformers makes of the same folder and conversation, token for token, refusals included."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest

from outrider.errors import ConfigurationError, InvalidRequest
from outrider.text.tokenizer import Tokenizer
from tests.coordinator.tiny_model import write_model_dir
from tests.outrider.prompts.conversations import CONVERSATIONS, TOOLS, VARIABLES, Conversation
from tests.outrider.prompts.folders import FOLDERS, write_folder
from tests.outrider.prompts.templates import TEMPLATES

WRONG_FORM = (TypeError, jinja2.UndefinedError)
READ_ONLY_PARTS = {"parts alone", "parts by index", "parts by filter"}
READ_PARTS = {"parts of text", "parts in a macro", *READ_ONLY_PARTS}
READ_ARGUMENT_TEXT = {
    *("arguments joined as text", "arguments joined with a tilde", "arguments printed", "arguments must be text"),
    "ids of nine characters, in text",
}
"""Templates that show arguments in this form alone, or print an object as Python does."""
NULL_ALONE = "calls only where content is null"
"""Needs a null, which transformers leaves out: no form of a conversation that transformers renders shows the call."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


def of_transformers(reference: Any, conversation: Conversation, variables: Mapping[str, Any]) -> list[int] | Exception:
    """Token ids, or the error by which transformers refuses."""
    given = {"add_generation_prompt": True, **variables}
    try:
        return list(reference.apply_chat_template(conversation, tokenize=True, return_dict=False, **given))
    except Exception as error:
        return error


def of_ours(tokenizer: Tokenizer, conversation: Conversation, variables: Mapping[str, Any]) -> list[int] | Exception:
    try:
        text = tokenizer.render_chat(conversation, **variables)
    except InvalidRequest as error:
        return error
    return tokenizer.encode(text, add_special_tokens=False)


def forms(name: str, conversation: Conversation) -> Iterator[Conversation]:
    """The conversation as transformers may be given it for a template: the documented form, and then the others that
    mean the same."""

    def formed(message: dict[str, Any], is_text: bool, null: Any) -> dict[str, Any]:
        content = null if message["content"] is None else message["content"]
        if isinstance(content, list) and name not in READ_PARTS:
            content = "\n".join(part["text"] for part in content)
        if isinstance(content, str) and name in READ_ONLY_PARTS:
            content = [{"type": "text", "text": content}]
        calls = []
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if not is_text:
                with contextlib.suppress(ValueError):
                    arguments = json.loads(arguments)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        return {**message, "content": content} | ({"tool_calls": calls} if calls else {})

    reads_text = name in READ_ARGUMENT_TEXT
    for null, is_text in itertools.product((None, ""), (reads_text, not reads_text)):
        yield [formed(message, is_text, null) for message in conversation]


def check(
    name: str, reference: Any, tokenizer: Tokenizer, conversation: Conversation, variables: Mapping[str, Any]
) -> None:
    """Compares a prompt, or a refusal."""
    ours = of_ours(tokenizer, conversation, variables)
    theirs = [of_transformers(reference, form, variables) for form in forms(name, conversation)]
    expected = next((each for each in theirs if not isinstance(each, WRONG_FORM)), theirs[0])
    if isinstance(expected, Exception):
        assert isinstance(ours, InvalidRequest), f"transformers refuses: {expected}"
        assert str(expected)[:300] in ours.message
    else:
        assert not isinstance(ours, Exception), f"transformers renders what is refused: {ours}"
        assert ours == expected


def loaded(folder: Path) -> tuple[Any, Tokenizer]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder), Tokenizer(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_rendered_as_by_transformers(model: Path, tmp_path: Path, name: str) -> None:
    config = {
        "eos_token": "<|end|>", "bos_token": "<|im_start|>", "think_token": "<|think|>", "image_token": "<|image|>",
        "chat_template": TEMPLATES[name],
    }  # fmt: skip
    files = {"tokenizer_config.json": config, "tokenizer.json": ["<|im_start|>", "<|im_end|>", "<|extra|>"]}
    reference, tokenizer = loaded(write_folder(model, tmp_path / "model", files))
    for conversation, variables in itertools.product(CONVERSATIONS.values(), VARIABLES.values()):
        if name == NULL_ALONE and any(message["content"] is None for message in conversation):
            continue
        check(name, reference, tokenizer, conversation, variables)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_by_transformers(model: Path, tmp_path: Path, name: str) -> None:
    reference, tokenizer = loaded(write_folder(model, tmp_path / "model", FOLDERS[name]))
    for conversation, variables in itertools.product(CONVERSATIONS.values(), VARIABLES.values()):
        check(name, reference, tokenizer, conversation, variables)
    texts = ["Hello <|im_start|> and <|im_end|><|extra|><|end|>", " a  <|x|>  b", "", "Köln"]
    for text in texts:
        for adds_special in (False, True):
            expected = reference.encode(text, add_special_tokens=adds_special)
            assert tokenizer.encode(text, add_special_tokens=adds_special) == expected
        token_ids = reference.encode(text)
        assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)


def test_the_corpus_is_large_enough() -> None:
    assert len(TEMPLATES) >= 80
    assert len(FOLDERS) >= 25


def test_earlier_calls_are_shown_where_only_a_null_content_shows_them(model: Path, tmp_path: Path) -> None:
    """transformers leaves out null and fails; an empty text would hide the call."""
    files = {"tokenizer_config.json": {"chat_template": TEMPLATES[NULL_ALONE]}}
    tokenizer = Tokenizer(write_folder(model, tmp_path / "model", files))
    text = tokenizer.render_chat(CONVERSATIONS["a call with a content of null"])
    assert 'weather{"city": "Köln", "days": 2}' in text


def template(model: Path, folder: Path, text: str) -> Tokenizer:
    return Tokenizer(write_folder(model, folder / "model", {"tokenizer_config.json": {"chat_template": text}}))


ARGUMENTS = '{"city": "Köln", "days": 2}'


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("arguments as JSON of an object", ARGUMENTS),
        ("arguments of either form", ARGUMENTS),
        ("arguments joined as text", ARGUMENTS),
        ("arguments joined with a tilde", ARGUMENTS),
        ("arguments printed", ARGUMENTS),
        ("arguments must be text", ARGUMENTS),
        ("arguments must be an object", "Köln"),
        ("arguments as elements", "<city>Köln<days>2"),
        ("arguments through the items filter", "<parameter=city>Köln</parameter><parameter=days>2</parameter>"),
    ],
)
def test_arguments_have_the_form_that_the_template_expects(model: Path, tmp_path: Path, name: str, shown: str) -> None:
    tokenizer = template(model, tmp_path, TEMPLATES[name])
    for arguments in (ARGUMENTS, json.loads(ARGUMENTS)):  # clients may send either
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages: Conversation = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        assert shown in tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("parts of text", "one|two|"),
        ("parts alone", "user:onetwo"),
        ("parts in a macro", "onetwo"),
        ("content joined as text", "[user]one\ntwo"),
        ("content trimmed", "one\ntwo"),
        ("chatml", "user\none\ntwo<|im_end|>"),
        ("tojson of text", '"one\\ntwo"'),
    ],
)
def test_parts_are_joined_unless_the_template_reads_them(model: Path, tmp_path: Path, name: str, shown: str) -> None:
    assert shown in template(model, tmp_path, TEMPLATES[name]).render_chat(CONVERSATIONS["parts"])


def test_a_text_is_a_part_for_templates_that_read_nothing_else(model: Path, tmp_path: Path) -> None:
    tokenizer = template(model, tmp_path, TEMPLATES["parts alone"])
    assert tokenizer.render_chat([{"role": "user", "content": "Hello"}]) == "user:Hello"


@pytest.mark.parametrize("name", TEMPLATES)
def test_short_ids_are_for_templates_that_refuse_others(model: Path, tmp_path: Path, name: str) -> None:
    tokenizer = template(model, tmp_path, TEMPLATES[name])
    assert tokenizer.takes_only_short_call_ids == ("nine characters" in name)


def test_how_a_prompt_is_rendered_is_not_the_clients_to_choose(model: Path, tmp_path: Path) -> None:
    tokenizer = template(model, tmp_path, TEMPLATES["chatml"])
    messages = [{"role": "user", "content": "x"}]
    for name in ("chat_template", "tokenize", "messages", "conversation", "conversations", "sanitize_control_tokens",
                 "return_assistant_tokens_mask", "self"):  # fmt: skip
        with pytest.raises(InvalidRequest, match=name) as caught:
            tokenizer.render_chat(messages, **{name: "{{ 1 }}"})
        assert caught.value.parameter == "chat_template_kwargs"


def test_the_last_message_can_be_continued_only_without_a_generation_prompt(model: Path, tmp_path: Path) -> None:
    tokenizer = template(model, tmp_path, TEMPLATES["chatml"])
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Well, "}]
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.render_chat(messages, continue_final_message=True)
    assert caught.value.parameter == "continue_final_message"
    text = tokenizer.render_chat(messages, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("assistant\nWell, ")


def test_no_conversation_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        template(model, tmp_path, TEMPLATES["chatml"]).render_chat([])


def test_the_template_for_tools_is_used_with_tools(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(model, tmp_path / "model", FOLDERS["files of named templates"]))
    messages: Sequence[Mapping[str, Any]] = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == "Dx"
    assert tokenizer.render_chat(messages, tools=TOOLS).startswith('T[{"type": "function"')
    assert tokenizer.template_reads("tools")


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizer", "CohereTokenizer"])
def test_folders_of_other_classes_are_read_alike(model: Path, tmp_path: Path, name: str) -> None:
    """`AutoTokenizer` takes the class that wrote the folder, which makes its tokenizer anew."""
    import transformers

    description = json.loads((model / "tokenizer.json").read_text())["model"]
    merges = [tuple(merge) for merge in description["merges"]]
    made = getattr(transformers, name)(vocab=description["vocab"], merges=merges, chat_template=TEMPLATES["chatml"])
    made.save_pretrained(tmp_path / "model")
    reference, tokenizer = loaded(tmp_path / "model")
    assert type(reference).__name__ == name
    for conversation in CONVERSATIONS.values():
        check("chatml", reference, tokenizer, conversation, {})
    for text in ("Hello  there", " a b", "é\n\n1234 don't"):
        assert tokenizer.encode(text) == reference.encode(text)
    assert reference.eos_token_id in tokenizer.eos_token_ids


def test_a_hostile_folder_runs_no_code_and_reads_no_other_file(model: Path, tmp_path: Path) -> None:
    ran, secret = tmp_path / "ran", tmp_path / "secret"
    secret.write_text("{}")
    code = f"open({str(ran)!r}, 'w').close()\nclass Evil: ..."
    config = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
        "trust_remote_code": True,
        "tokenizer_file": str(secret),
        "vocab_file": str(secret),
        "gguf_file": str(secret),
        "chat_template": "{{ messages[0].content }}",
    }
    files = {"tokenizer_config.json": config, "tokenization_evil.py": code, "__init__.py": code}
    tokenizer = Tokenizer(write_folder(model, tmp_path / "model", files))
    assert tokenizer.render_chat([{"role": "user", "content": "Hello"}]) == "Hello"
    assert tokenizer.encode("Hello") == Tokenizer(model).encode("Hello")
    assert not ran.exists()


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": [{"name": "default", "template": ["x"]}]},
        {"eos_token": 5},
        {"extra_special_tokens": "x"},
        {"added_tokens_decoder": {"x": {}}},
        {"padding_side": "up"},
        {"tokenizer_object": "x"},
        {"extra_special_tokens": {"chat_template": "x", "add_generation_prompt": "y"}},
    ],
    ids=str,
)
def test_a_damaged_configuration_is_an_error_that_says_so(model: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    """When the folder is loaded, or for each request that needs what is damaged."""
    folder = write_folder(model, tmp_path / "model", {"tokenizer_config.json": config})
    with contextlib.suppress(ConfigurationError, InvalidRequest):
        tokenizer = Tokenizer(folder)
        tokenizer.study_templates()
        tokenizer.render_chat([{"role": "user", "content": "Hello"}])

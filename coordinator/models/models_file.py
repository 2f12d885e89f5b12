"""The file of served models, which is read again when it changes. Pure but for reading files and loading tokenizers.

    [[models]]
    name = "large"                   # the name under which targets serve it
    tokenizer = "/models/large"      # its model folder; paths are relative to this file
    drafts = ["large-draft"]         # optional: only draft workers of these names send it hints
    aliases = ["gpt-4o"]             # optional: other names that clients may use
    chat_template = "large.jinja"    # optional, as --chat-template
    tool_call_parser = "hermes"      # optional, as --tool-call-parser
    reasoning_parser = "qwen3"       # optional, as --reasoning-parser
    request_timeout = 900            # optional, as --request-timeout

A changed file is read by a thread, which loads the tokenizers of new models before they are served. Models whose entry
and files are as before are kept. A file that is wrong in any part changes nothing: what was read before stays in force.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coordinator.formats.names import ReasoningParserName, ToolCallParserName, check_combination
from coordinator.formats.output_format import choose_format
from coordinator.models.model_table import ModelTable
from coordinator.models.served_model import ServedModel
from coordinator.settings import CoordinatorSettings
from outrider.errors import ConfigurationError
from outrider.security.watched_files import Stamp, WatchedFiles, stamp_of
from outrider.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

MODELS_MAX: Final = 64
"""Most models of one coordinator: each has a tokenizer in memory, and a guaranteed share of `--max-requests`."""
_FILE_BYTES_MAX: Final = 1 << 20
_TEMPLATE_BYTES_MAX: Final = 1 << 20
# What a tokenizer is read from.
_TOKENIZER_FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates", "additional_chat_templates/tool_use.jinja", "generation_config.json", "config.json",
)  # fmt: skip

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Name
    tokenizer: Annotated[str, Field(min_length=1)]
    drafts: tuple[_Name, ...] = ()
    aliases: tuple[_Name, ...] = ()
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    tool_call_parser: ToolCallParserName | None = None
    reasoning_parser: ReasoningParserName | None = None
    request_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check(self) -> _Entry:
        check_combination(self.tool_call_parser, self.reasoning_parser)
        return self


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: Annotated[list[_Entry], Field(min_length=1, max_length=MODELS_MAX)]


class ServedModels(Protocol):
    """The models that a coordinator serves now."""

    def current(self) -> ModelTable:
        """The table in force. It may be another one at the next call."""
        ...

    def refusal(self) -> str | None:
        """Why the last change has no effect; None if nothing was refused."""
        ...


@dataclass(frozen=True, slots=True)
class FixedModels:
    """A table that stays for the life of the process."""

    table: ModelTable

    def current(self) -> ModelTable:
        return self.table

    def refusal(self) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A served model, and what it was made of."""

    entry: _Entry
    template: str | None  # text of the chat template
    stamp: Stamp  # of the tokenizer's files
    model: ServedModel = field(compare=False)


class ModelsFile:
    """The models of a file. Thread-safe."""

    def __init__(self, path: Path, deadline_max_s: float) -> None:
        """Reads the file. Raises ConfigurationError."""
        self._path = path
        self._deadline_max_s = deadline_max_s
        self._loaded: dict[str, _Loaded] = {}  # by name
        self._refusal: str | None = None
        self._files = WatchedFiles([path], self._read, small_bytes=0)

    def current(self) -> ModelTable:
        return self._files.current()

    def refusal(self) -> str | None:
        return self._refusal if self._files.refused_for_s() is not None else None

    def _read(self) -> ModelTable:
        before = self._loaded
        try:
            found = {entry.name: self._load(entry, before.get(entry.name)) for entry in _entries(self._path)}
        except Exception as error:
            self._refusal = error.message if isinstance(error, ConfigurationError) else repr(error)
            raise
        if before:
            for name in found.keys() - before.keys():
                _log.warning("model %s is served from now on", name)
            for name in before.keys() - found.keys():
                _log.warning("model %s takes no new requests; %s does not list it any more", name, self._path)
        self._loaded = found
        return ModelTable(
            {name: each.model for name, each in found.items()},
            {alias: name for name, each in found.items() for alias in each.entry.aliases},
        )

    def _load(self, entry: _Entry, before: _Loaded | None) -> _Loaded:
        """Loads a model, or keeps the one from before if nothing of it has changed. Raises ConfigurationError."""
        folder = self._path.parent / entry.tokenizer
        template = None if entry.chat_template is None else _text_of(self._path.parent / entry.chat_template)
        stamp = stamp_of(folder / name for name in _TOKENIZER_FILES)
        if before is not None and (before.entry, before.template, before.stamp) == (entry, template, stamp):
            return before
        if entry.request_timeout is not None and entry.request_timeout > self._deadline_max_s:
            raise ConfigurationError(
                f"{self._path}: model {entry.name}: request_timeout is {entry.request_timeout:g}; permitted: up to "
                f"deadline_max_s, {self._deadline_max_s:g}"
            )
        try:
            model = new_model(
                folder,
                template,
                entry.tool_call_parser,
                entry.reasoning_parser,
                draft_models=frozenset(entry.drafts),
                deadline_default_s=entry.request_timeout,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{self._path}: model {entry.name}: {error.message}") from error
        if self._loaded:  # requests are served: whatever takes long is done before its first one
            model.grammars.load()
        return _Loaded(entry, template, stamp, model)


def open_models(settings: CoordinatorSettings) -> ServedModels:
    """Loads the models that the settings name. Raises ConfigurationError."""
    if settings.models_file is not None:
        return ModelsFile(Path(settings.models_file), settings.deadline_max_s)
    model = new_model(
        Path(settings.tokenizer_dir), settings.chat_template, settings.tool_call_parser, settings.reasoning_parser
    )
    names = dict.fromkeys(settings.served_model_names, model)
    return FixedModels(ModelTable(names, others=None if names else model))


def new_model(
    tokenizer_dir: Path,
    chat_template: str | None,
    calls: ToolCallParserName | None,
    reasoning: ReasoningParserName | None,
    **others: Any,
) -> ServedModel:
    """Loads a model's tokenizer and chooses its formats; `others` are fields of `ServedModel`. Raises
    ConfigurationError."""
    tokenizer = Tokenizer(tokenizer_dir, chat_template)
    if not tokenizer.has_chat_template:
        _log.warning("%s has no chat template; messages are joined by newlines", tokenizer_dir)
    tokenizer.study_templates()
    output_format = choose_format(tokenizer.chat_template, calls, reasoning)
    _log.info("formats of the output of %s: %s", tokenizer_dir, output_format.description)
    return ServedModel(tokenizer, output_format, **others)


def _entries(path: Path) -> list[_Entry]:
    """Reads the entries of a file. Raises ConfigurationError."""
    try:
        content: Mapping[str, Any] = tomllib.loads(_text_of(path, _FILE_BYTES_MAX))
        entries = _File.model_validate(content).models
        _check_names(entries)
    except ValidationError as error:
        raise ConfigurationError(f"the file of models {path} is not valid: {_described(error)}") from None
    except (ValueError, RecursionError) as error:  # also for text that is not TOML
        raise ConfigurationError(f"the file of models {path} is not valid: {error}") from None
    return entries


def _check_names(entries: list[_Entry]) -> None:
    """Raises ValueError for a name that several models have."""
    seen: set[str] = set()
    for name in (name for entry in entries for name in (entry.name, *entry.aliases)):
        if name in seen:
            raise ValueError(f"{name!r} names two models; names and aliases must differ")
        seen.add(name)


def _text_of(path: Path, bytes_max: int = _TEMPLATE_BYTES_MAX) -> str:
    """Reads a text file. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise ConfigurationError(f"{path} is longer than {bytes_max} bytes")
        return content.decode()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8: {error}") from error


def _described(error: ValidationError) -> str:
    details: list[dict[str, Any]] = [dict(each) for each in error.errors(include_input=False, include_url=False)]
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in details[:5])

"""The file of served models: what it may say, what is refused, and what a change does."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.formats.names import ReasoningParserName, ToolCallParserName
from coordinator.formats.output_format import MarkedFormat
from coordinator.models import models_file
from coordinator.models.models_file import MODELS_MAX, ModelsFile, open_models
from coordinator.settings import CoordinatorSettings
from outrider.errors import ConfigurationError
from outrider.security import watched_files
from outrider.settings import from_flags, make_parser
from tests.coordinator.fakes import record_of
from tests.coordinator.tiny_model import write_model_dir, write_other_model_dir
from tests.e2e.system import eventually


@pytest.fixture(autouse=True)
def looks_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders of different tokenizers: small, large, other."""
    root = tmp_path_factory.mktemp("folders")
    for number, name in enumerate(("small", "large", "other")):
        write_other_model_dir(root / name, number)
    return root


def entry(name: str, tokenizer: Path | str, **fields: Any) -> str:
    lines = [
        f"{key} = {json.dumps(value)}" for key, value in {"name": name, "tokenizer": str(tokenizer), **fields}.items()
    ]
    return "\n".join(["[[models]]", *lines, ""])


class Written:
    """A file of models that changes. Each version is a little younger than the one before, and older than a second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written_s = time.time() - 10_000

    def write(self, *entries: str) -> None:
        self.path.write_text("\n".join(entries))
        self._written_s += 10
        os.utime(self.path, (self._written_s, self._written_s))

    def open(self, deadline_max_s: float = 3600.0) -> ModelsFile:
        return ModelsFile(self.path, deadline_max_s)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "models.toml")


def names(models: ModelsFile) -> list[str]:
    return sorted(models.current().by_name)


def until_names(models: ModelsFile, *expected: str) -> None:
    eventually(lambda: names(models), lambda seen: seen == sorted(expected), f"the models are {expected}", 10)


def test_every_entry_has_its_own_tokenizer_formats_and_drafts(written: Written, folders: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}!")
    written.write(
        entry("small", folders / "small"),
        entry(
            "large", folders / "large", aliases=["big"], drafts=["d1", "d2"], chat_template="chat.jinja",
            tool_call_parser="mistral", reasoning_parser="qwen3", request_timeout=30,
        ),
    )  # fmt: skip
    table = written.open().current()
    small, large = table.by_name["small"], table.by_name["large"]
    assert small.fingerprint != large.fingerprint
    assert (set(small.draft_models), set(large.draft_models)) == (set(), {"d1", "d2"})
    assert (small.deadline_default_s, large.deadline_default_s) == (None, 30.0)
    assert large.output_format == MarkedFormat(ToolCallParserName.MISTRAL, ReasoningParserName.QWEN3)
    assert large.tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    assert (table.name_of("big"), table.name_of("small")) == ("large", "small")
    assert table.get("another") is None


def test_paths_are_relative_to_the_file(written: Written) -> None:
    write_model_dir(written.path.parent / "models" / "a")
    written.write(entry("a", "models/a"))
    assert names(written.open()) == ["a"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folders: [""], "models: Field required"),
        (lambda folders: ["models = []"], "at least 1"),
        (lambda folders: ["[[models"], "not valid"),
        (lambda folders: [entry("a", folders / "small", colour="red")], "models.0.colour"),
        (lambda folders: ['[[models]]\nname = "a"'], "models.0.tokenizer: Field required"),
        (lambda folders: [entry("", folders / "small")], "models.0.name"),
        (lambda folders: [entry("a", folders / "small")] * 2, "'a' names two models"),
        (lambda folders: [entry("a", folders / "small"), entry("b", folders / "large", aliases=["a"])], "'a' nam"),
        (lambda folders: [entry(f"m{at}", folders / "small") for at in range(MODELS_MAX + 1)], f"at most {MODELS_MAX}"),
        (lambda folders: [entry("a", folders / "none")], "model a: .*none/tokenizer.json does not exist"),
        (lambda folders: [entry("a", folders / "small", chat_template="none.jinja")], "none.jinja cannot be read"),
        (lambda folders: [entry("a", folders / "small", chat_template="models.toml")], "the given chat template"),
        (lambda folders: [entry("a", folders / "small", tool_call_parser="sonnet")], "models.0.tool_call_parser"),
        (
            lambda folders: [entry("a", folders / "small", tool_call_parser="openai", reasoning_parser="qwen3")],
            "cannot be combined",
        ),
        (lambda folders: [entry("a", folders / "small", request_timeout=0)], "models.0.request_timeout"),
        (lambda folders: [entry("a", folders / "small", request_timeout=9999)], "up to deadline_max_s, 3600"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_reason(
    written: Written, folders: Path, make: Callable[[Path], list[str]], reason: str
) -> None:
    entries = make(folders)
    if reason.endswith("template"):
        entries.append("# {% if %}")  # of the file, which is no template
    written.write(*entries)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        written.open()
    assert str(written.path.parent) in caught.value.message


def test_a_file_that_is_not_there_is_refused(written: Written) -> None:
    with pytest.raises(ConfigurationError, match=r"models\.toml cannot be read"):
        written.open()


def test_models_come_and_go_and_those_that_stay_are_the_same_objects(written: Written, folders: Path) -> None:
    written.write(entry("small", folders / "small"), entry("large", folders / "large"))
    models = written.open()
    before = models.current()
    written.write(entry("small", folders / "small"), entry("other", folders / "other"))
    until_names(models, "small", "other")
    assert models.current().by_name["small"] is before.by_name["small"]
    assert names_of(before) == ["large", "small"], "a table that a request has found does not change"
    assert models.refusal() is None
    written.write(entry("small", folders / "small", drafts=["d"]), entry("other", folders / "other"))
    eventually(
        lambda: models.current().by_name["small"].draft_models, lambda seen: seen == {"d"}, "the entry has changed", 10
    )


def names_of(table: Any) -> list[str]:
    return sorted(table.by_name)


def test_a_tokenizer_that_was_replaced_is_loaded_again_with_the_file(written: Written, tmp_path: Path) -> None:
    folder = write_other_model_dir(tmp_path / "model", 0)
    written.write(entry("a", folder))
    models = written.open()
    before = models.current().by_name["a"].fingerprint
    write_other_model_dir(folder, 1)
    assert models.current().by_name["a"].fingerprint == before
    written.write(entry("a", folder))
    eventually(
        lambda: models.current().by_name["a"].fingerprint, lambda seen: seen != before, "the new tokenizer counts", 10
    )


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_change_for_the_worse_changes_nothing_until_it_is_mended(
    written: Written, folders: Path, is_gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    written.write(entry("small", folders / "small"))
    models = written.open()
    before = models.current()
    if is_gone:
        written.path.unlink()
    else:
        written.write(entry("small", folders / "large"), entry("large", folders / "none"))
    reason = eventually(models.refusal, lambda seen: seen is not None, "it is refused", 10)
    assert reason is not None
    assert ("models.toml cannot be read" if is_gone else "model large:") in reason
    assert models.current() is before
    assert reason in caplog.text
    written.write(entry("large", folders / "large"))
    until_names(models, "large")
    assert models.refusal() is None


def test_a_new_tokenizer_is_loaded_by_another_thread_before_it_is_listed(
    written: Written, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.write(entry("small", folders / "small"))
    models = written.open()
    may_load, loading = threading.Event(), []
    new_model = models_file.new_model

    def slowly(*arguments: Any, **others: Any) -> Any:
        loading.append(threading.current_thread())
        assert may_load.wait(20)
        return new_model(*arguments, **others)

    monkeypatch.setattr(models_file, "new_model", slowly)
    written.write(entry("small", folders / "small"), entry("large", folders / "large"))
    eventually(lambda: (models.current(), loading)[1], bool, "the new model is being loaded", 10)
    assert names(models) == ["small"]
    assert loading[0] is not threading.main_thread()
    assert len(loading) == 1, "the other is kept"
    may_load.set()
    until_names(models, "small", "large")


class TestWorkers:
    """Which workers the models of a file can use."""

    @pytest.fixture
    def models(self, written: Written, folders: Path) -> ModelsFile:
        written.write(
            entry("small", folders / "small"),
            entry("large", folders / "large", drafts=["large-draft"]),
            entry("larger", folders / "large", drafts=["large-draft", "larger-draft"]),
        )
        return written.open()

    @pytest.mark.parametrize(
        ("model", "tokenizer", "reason"),
        [
            ("small", "small", None),
            ("large", "large", None),
            ("small", "large", "tokenizer fingerprint "),
            ("another", "small", "serves 'another', this coordinator serves large, larger, small"),
        ],
    )
    def test_a_target_must_have_the_tokenizer_of_its_name(
        self, models: ModelsFile, model: str, tokenizer: str, reason: str | None
    ) -> None:
        table = models.current()
        theirs = table.by_name[tokenizer].fingerprint
        found = table.reason_against(record_of("target", "h:1", theirs, model_name=model))
        if reason is None:
            assert found is None
        else:
            assert found is not None
            assert found.startswith(reason)
            if model in table.by_name:
                assert theirs in found
                assert table.by_name[model].fingerprint in found

    @pytest.mark.parametrize(
        ("name", "tokenizer", "serves"),
        [
            ("any", "small", ["small"]),
            ("large-draft", "small", ["small"]),
            ("large-draft", "large", ["large", "larger"]),
            ("larger-draft", "large", ["larger"]),
            ("any", "large", []),
            ("large-draft", None, []),
        ],
    )
    def test_a_draft_worker_hints_at_the_models_of_its_tokenizer_that_name_it(
        self, models: ModelsFile, name: str, tokenizer: str | None, serves: list[str]
    ) -> None:
        table = models.current()
        theirs = table.by_name[tokenizer].fingerprint if tokenizer else "f" * 16
        worker = record_of("draft", "h:1", theirs, model_name=name)
        assert sorted(each for each, model in table.by_name.items() if model.admits_draft(worker)) == serves
        reason = table.reason_against(worker)
        assert (reason is None) == bool(serves)
        if tokenizer is None:
            assert "tokenizer fingerprint ffff" in str(reason)
        elif not serves:
            assert reason == f"no served model of its tokenizer names {name!r} among its draft models"


class TestSettings:
    """`--models` stands in place of `--tokenizer` and what belongs to it."""

    def test_one_of_both_is_required(self) -> None:
        with pytest.raises(ValueError, match=r"--tokenizer .* or --models"):
            CoordinatorSettings(redis_url="unused")

    @pytest.mark.parametrize(
        ("field", "value", "flag"),
        [
            ("tokenizer_dir", "x", "--tokenizer"),
            ("served_model_names", ("a",), "--served-model-name"),
            ("chat_template", "x", "--chat-template"),
            ("tool_call_parser", ToolCallParserName.HERMES, "--tool-call-parser"),
            ("reasoning_parser", ReasoningParserName.NONE, "--reasoning-parser"),
        ],
    )
    def test_what_is_said_per_model_is_refused_beside_the_file(self, field: str, value: Any, flag: str) -> None:
        fields: dict[str, Any] = {"redis_url": "unused", "models_file": "models.toml", field: value}
        with pytest.raises(ValueError, match=f"{flag} is for one model"):
            CoordinatorSettings(**fields)

    def test_the_flag_is_enough(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        parser = make_parser("coordinator", None, CoordinatorSettings)
        given = parser.parse_args(["--models", "models.toml", "--redis-url", "unused"])
        assert from_flags(CoordinatorSettings, given).models_file == str(tmp_path / "models.toml")
        given = parser.parse_args(["--tokenizer", "model", "--redis-url", "unused"])
        assert from_flags(CoordinatorSettings, given).tokenizer_dir == str(tmp_path / "model")

    def test_the_simple_form_is_one_model_under_every_name(self, folders: Path) -> None:
        made = CoordinatorSettings(redis_url="unused", tokenizer_dir=str(folders / "small"))
        table = open_models(made).current()
        assert table.get("any") is table.get("other") is table.only
        made = CoordinatorSettings(
            redis_url="unused", tokenizer_dir=str(folders / "small"), served_model_names=("a", "b")
        )
        table = open_models(made).current()
        assert table.get("a") is table.get("b") is table.only
        assert table.get("c") is None

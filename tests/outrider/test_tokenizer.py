"""Token ids to text and back: fingerprints, chat templates, whole characters, stop strings."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.errors import ConfigurationError, InvalidRequest
from outrider.text.chat_template import read_folder
from outrider.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from outrider.text.tokenizer import LONG_TEXT_CHARS, Tokenizer, fingerprint
from tests.coordinator.tiny_model import write_model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


def edited(model_dir: Path, into: Path, edit: Any) -> Path:
    description = json.loads((model_dir / "tokenizer.json").read_text())
    edit(description)
    (into / "tokenizer.json").write_text(json.dumps(description))
    return into


def beside(model_dir: Path, folder: Path, **files: Any) -> Path:
    """A folder with the same `tokenizer.json` and other JSON files."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def next_id(model_dir: Path) -> int:
    return Tokenizer(model_dir).num_ids


def _in_its_configuration(model_dir: Path, token: str) -> dict[str, Any]:
    return {"tokenizer_config": {"added_tokens_decoder": {str(next_id(model_dir)): {"content": token}}}}


def _in_a_file_of_added_tokens(model_dir: Path, token: str) -> dict[str, Any]:
    return {"added_tokens": {token: next_id(model_dir)}}


def _as_special_tokens(model_dir: Path, token: str) -> dict[str, Any]:
    return {"special_tokens_map": {"pad_token": token}}


def test_importing_and_using_the_tokenizer_does_not_import_torch(model_dir: Path) -> None:
    program = (
        "import sys, pathlib; from outrider.text.tokenizer import Tokenizer; "
        f"made = Tokenizer(pathlib.Path({str(model_dir)!r})); made.study_templates(); "
        "made.encode(made.render_chat([{'role': 'user', 'content': 'x'}], tools=[{'type': 'function'}])); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class TestLongTexts:
    @pytest.mark.thorough
    @pytest.mark.parametrize("add_special_tokens", [True, False])
    @given(text=st.text(max_size=30))
    @example(text="def f(x):\n    return x + 1\n<|end|>")
    def test_they_are_cut_as_short_ones_are(self, tokenizer: Tokenizer, add_special_tokens: bool, text: str) -> None:
        long = text * (LONG_TEXT_CHARS // max(len(text), 1) + 1)
        token_ids = tokenizer.encode(long, add_special_tokens=add_special_tokens)
        assert token_ids == tokenizer._tokenizer.encode(long, add_special_tokens=add_special_tokens).ids
        for skips in (True, False):
            decoded = tokenizer.decode(token_ids, skip_special_tokens=skips)
            assert decoded == tokenizer._tokenizer.decode(token_ids, skip_special_tokens=skips)

    @pytest.mark.thorough
    def test_other_threads_run_while_a_long_text_is_tokenized_or_decoded(self, tokenizer: Tokenizer) -> None:
        text = "def f(x):\n    return x + 1\n" * 100_000

        def turns_during(work: Callable[[], object]) -> int:
            """How often another thread wakes meanwhile; not before the work is done where it keeps the lock."""
            num_turns, has_ended = 0, threading.Event()

            def count() -> None:
                nonlocal num_turns
                while not has_ended.wait(0.001):
                    num_turns += 1

            other = threading.Thread(target=count)
            other.start()
            work()
            found = num_turns
            has_ended.set()
            other.join()
            return found

        token_ids = list[int]()
        assert turns_during(lambda: token_ids.extend(tokenizer.encode(text))) > 10
        assert turns_during(lambda: tokenizer.decode(token_ids)) > 10


class TestFingerprint:
    def test_it_is_sixteen_hexadecimal_characters(self, model_dir: Path) -> None:
        assert len(fingerprint(model_dir)) == 16
        int(fingerprint(model_dir), 16)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda d: d.update(padding={"strategy": "BatchLongest"}, truncation=None, version="2.0"),
            lambda d: d["pre_tokenizer"].update(trim_offsets=not d["pre_tokenizer"]["trim_offsets"]),
            lambda d: d["model"].update(merges=[" ".join(merge) for merge in d["model"]["merges"]]),
            lambda d: d["model"].update(vocab=dict(reversed(d["model"]["vocab"].items()))),
            lambda d: d["model"]["vocab"].pop("<|end|>"),  # still among the added tokens
            lambda d: d["model"].pop("ignore_merges", None),
            lambda d: d.update(post_processor=None),
        ],
    )
    def test_what_changes_no_token_changes_nothing(self, model_dir: Path, tmp_path: Path, edit: Any) -> None:
        assert fingerprint(edited(model_dir, tmp_path, edit)) == fingerprint(model_dir)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda d: d["model"]["vocab"].update({"brandnew": 300}),
            lambda d: d["model"]["merges"].pop(),
            lambda d: d["added_tokens"][0].update(content="<|stop|>"),
            lambda d: d.update(normalizer={"type": "Lowercase"}),
            lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
        ],
    )
    def test_what_changes_a_token_changes_it(self, model_dir: Path, tmp_path: Path, edit: Any) -> None:
        assert fingerprint(edited(model_dir, tmp_path, edit)) != fingerprint(model_dir)

    @pytest.mark.parametrize("form", [_in_its_configuration, _in_a_file_of_added_tokens, _as_special_tokens])
    def test_tokens_beside_the_file_count(self, model_dir: Path, tmp_path: Path, form: Any) -> None:
        folders = [beside(model_dir, tmp_path / name, **form(model_dir, name)) for name in ("<tool>", "<think>")]
        made = [Tokenizer(folder) for folder in folders]
        (new_id,) = {folder.encode(name)[-1] for folder, name in zip(made, ("<tool>", "<think>"), strict=True)}
        assert [folder.decode([new_id], skip_special_tokens=False) for folder in made] == ["<tool>", "<think>"]
        assert len({fingerprint(model_dir), *map(fingerprint, folders)}) == 3
        assert [folder.fingerprint for folder in made] == [fingerprint(folder) for folder in folders]

    def test_it_does_not_matter_in_which_file_a_token_stands(self, model_dir: Path, tmp_path: Path) -> None:
        whole = tmp_path / "whole"
        apart = beside(model_dir, tmp_path / "apart", **_in_its_configuration(model_dir, "<tool>"))
        whole.mkdir()
        read_folder(apart).backend_tokenizer.save(str(whole / "tokenizer.json"))
        assert fingerprint(whole) == fingerprint(apart) != fingerprint(model_dir)

    def test_other_files_that_add_no_token_change_nothing(self, model_dir: Path, tmp_path: Path) -> None:
        description = json.loads((model_dir / "tokenizer.json").read_text())
        known = {str(token.pop("id")): token for token in description["added_tokens"]}
        files = {
            "tokenizer_config": {"added_tokens_decoder": known, "eos_token": "<|end|>", "model_max_length": 99},
            "special_tokens_map": {"eos_token": {"content": "<|end|>", "lstrip": False}},
            "added_tokens": {token["content"]: int(token_id) for token_id, token in known.items()},
        }
        folder = beside(model_dir, tmp_path / "folder", **files)
        assert fingerprint(folder) == fingerprint(beside(model_dir, tmp_path / "alone")) == fingerprint(model_dir)

    def test_it_stays_what_earlier_releases_computed(self, tmp_path: Path) -> None:
        """Workers of two releases meet during an upgrade."""
        end = {"id": 2, "content": "<|end|>", "special": True}
        model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<|end|>": 2}, "unk_token": "a"}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [end], "model": model}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
        assert fingerprint(tmp_path) == "6ca07f33da0baf27"

    def test_a_folder_without_tokenizer_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
            fingerprint(tmp_path)

    def test_a_damaged_file_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
            Tokenizer(tmp_path)


class TestTokenizer:
    def test_decode_reverses_encode(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.decode(tokenizer.encode("naïve 中文 😀\n")) == "naïve 中文 😀\n"

    def test_the_bytes_of_tokens_add_up_to_the_text(self, tokenizer: Tokenizer) -> None:
        text = "naïve 中文 😀 𓀀\n\t"
        token_ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()
        assert any(b"\xf0" in tokenizer.token_bytes(token_id) for token_id in token_ids)

    def test_special_tokens_have_the_bytes_of_their_name_and_unknown_ids_none(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.token_bytes(0) == b"<|end|>"
        assert tokenizer.token_bytes(99999) == b""
        assert tokenizer.added_token_ids == {"<|end|>": 0}
        assert tokenizer.is_special(0)
        assert not tokenizer.is_special(1)

    def test_vocabularies_that_spell_bytes_are_read(self, model_dir: Path, tmp_path: Path) -> None:
        def edit(description: Any) -> None:
            description["decoder"] = {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            }
            description["model"]["vocab"].update({"<0xE4>": 400, "\u2581word": 401})

        model = Tokenizer(edited(model_dir, tmp_path, edit))
        assert model.token_bytes(400) == b"\xe4"
        assert model.token_bytes(401) == b" word"

    def test_the_end_tokens_of_the_model_and_of_the_tokenizer_are_united(self, tmp_path: Path) -> None:
        """As in vLLM: a chat model may name its turn's end in either place."""
        directory = write_model_dir(tmp_path)
        assert Tokenizer(directory).eos_token_ids == {0}
        (directory / "config.json").write_text('{"eos_token_id": 3}')
        assert Tokenizer(directory).eos_token_ids == {0, 3}
        (directory / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
        assert Tokenizer(directory).eos_token_ids == {0, 4, 5}

    def test_a_model_without_template_joins_the_messages(self, tokenizer: Tokenizer) -> None:
        assert not tokenizer.has_chat_template
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
        assert tokenizer.render_chat(messages) == "a\nb\n"

    def test_the_template_sees_special_tokens_and_keywords(self, tmp_path: Path) -> None:
        template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}{{ mood }}"
        model = Tokenizer(write_model_dir(tmp_path, chat_template=template))
        assert model.render_chat([{"role": "user", "content": "hi"}], mood="!") == "user:hi<|end|>!"

    def test_a_template_may_refuse_the_messages(self, tmp_path: Path) -> None:
        model = Tokenizer(write_model_dir(tmp_path, chat_template="{{ raise_exception('no system role') }}"))
        with pytest.raises(InvalidRequest, match="no system role") as caught:
            model.render_chat([{"role": "user", "content": "hi"}])
        assert caught.value.parameter == "messages"

    def test_a_given_template_is_checked_at_once_and_comes_before_the_model_s_own(self, tmp_path: Path) -> None:
        directory = write_model_dir(tmp_path, chat_template="{% not Jinja")
        assert Tokenizer(directory, "{{ messages[0].role }}").render_chat([{"role": "user"}]) == "user"
        with pytest.raises(ConfigurationError, match="the given chat template is not valid"):
            Tokenizer(directory, "{% for %}")

    def test_a_template_cannot_reach_out_of_its_sandbox(self, tmp_path: Path) -> None:
        template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
        model = Tokenizer(write_model_dir(tmp_path, chat_template=template))
        with pytest.raises(InvalidRequest):
            model.render_chat([{"role": "user", "content": "hi"}])


class TestIncrementalDetokenizer:
    @given(text=st.text(max_size=40))
    def test_the_pieces_add_up_to_the_text(self, tokenizer: Tokenizer, text: str) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
        assert "".join(pieces) + detokenizer.flush() == text

    def test_a_character_split_over_tokens_appears_whole(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        token_ids = tokenizer.encode("𓀀")
        assert len(token_ids) == 4
        assert [detokenizer.push(token_id) for token_id in token_ids] == ["", "", "", "𓀀"]

    def test_an_unfinished_character_appears_at_the_end_only(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert [detokenizer.push(token_id) for token_id in tokenizer.encode("𓀀")[:3]] == ["", "", ""]
        assert set(detokenizer.flush()) == {"\ufffd"}

    def test_bytes_that_are_no_text_do_not_hold_back_what_follows(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        lone_byte = tokenizer.encode("𓀀")[1]
        shown = "".join(detokenizer.push(lone_byte) for _ in range(100))
        assert len(shown) >= 80
        shown = "".join(detokenizer.push(token_id) for token_id in tokenizer.encode(" and on"))
        assert shown.endswith(" and on")

    def test_a_character_begun_by_the_prompt_is_completed(self, tokenizer: Tokenizer) -> None:
        token_ids = tokenizer.encode("𓀀")
        detokenizer = IncrementalDetokenizer(tokenizer, context_token_ids=token_ids[:2])
        assert detokenizer.push(token_ids[2]) + detokenizer.push(token_ids[3]) == "𓀀"

    def test_special_tokens_are_skipped_unless_asked_for(self, tokenizer: Tokenizer) -> None:
        token_ids = [*tokenizer.encode("a"), 0, *tokenizer.encode("b")]
        for skip, expected in ((True, "ab"), (False, "a<|end|>b")):
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
            assert "".join(map(detokenizer.push, token_ids)) + detokenizer.flush() == expected

    def test_a_long_run_of_skipped_tokens_stays_cheap(self, tokenizer: Tokenizer) -> None:
        widths = []

        class Watching:
            def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
                widths.append(len(token_ids))
                return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        detokenizer = IncrementalDetokenizer(Watching())
        for _ in range(500):
            detokenizer.push(0)
        assert max(widths) < 100


class TestStopStringMatcher:
    @given(
        text=st.text("abc", max_size=30),
        stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
        cuts=st.lists(st.integers(0, 30), max_size=6),
        include=st.booleans(),
    )
    def test_the_outcome_does_not_depend_on_how_the_text_was_cut(
        self, text: str, stop: list[str], cuts: list[int], include: bool
    ) -> None:
        def run(pieces: list[str]) -> tuple[str, str | None]:
            matcher = StopStringMatcher(stop, include_stop_str_in_output=include)
            shown = "".join(map(matcher.push, pieces))
            return shown + ("" if matcher.matched else matcher.flush()), matcher.matched

        borders = [0, *sorted(cuts), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
        assert run(pieces) == run(list(text)) == run([text])
        shown, matched = run([text])
        assert (matched is None) == (not any(each in text for each in stop))
        assert text.startswith(shown)

    def test_text_that_may_become_a_stop_string_is_held_back(self) -> None:
        matcher = StopStringMatcher(["\n\ndef"])
        assert [matcher.push(piece) for piece in ("x\n", "\nde", "x")] == ["x", "", "\n\ndex"]

    def test_a_stop_string_across_pieces_is_cut_out(self) -> None:
        matcher = StopStringMatcher(["STOP"])
        assert [matcher.push(piece) for piece in ("a ST", "OP b", "c")] == ["a ", "", ""]
        assert matcher.matched == "STOP"

    def test_the_stop_string_stays_when_asked_for(self) -> None:
        matcher = StopStringMatcher(["STOP"], include_stop_str_in_output=True)
        assert matcher.push("a STOP b") == "a STOP"

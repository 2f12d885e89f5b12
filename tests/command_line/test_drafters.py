"""Sources of hints that folders offer, by what is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line.start.drafters import DrafterName, chosen, offered
from outrider.errors import ConfigurationError
from tests.command_line.conftest import write_head, write_model


def model(folder: Path, **config: object) -> Path:
    write_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_each_folder_offers_what_is_in_it(tmp_path: Path) -> None:
    target = model(tmp_path / "target", num_hidden_layers=9)
    drafts = [
        model(tmp_path / "small"),
        model(tmp_path / "masks", pard_token=3),
        write_head(tmp_path / "eagle"),
        write_head(tmp_path / "medusa", "medusa"),
    ]
    found = offered(target, drafts)
    assert [(str(each.name), dict(each.changes)) for each in found] == [
        ("draft", {"draft": drafts[0]}),
        ("parallel", {"draft": drafts[1]}),
        ("head", {"draft": drafts[2], "draft_head": drafts[2]}),
        ("local-head", {"draft_head": drafts[2]}),
        ("local-head", {"draft_head": drafts[3]}),
        ("early-exit", {"draft": target, "early_exit_layer": 2}),
        ("lookup", {}),
    ]
    assert [each.has_draft_worker for each in found] == [True, True, True, False, False, True, False]


def test_a_target_offers_its_mtp_layer(tmp_path: Path) -> None:
    target = model(tmp_path / "target", num_hidden_layers=1, num_nextn_predict_layers=1)
    assert [(str(each.name), each.flags) for each in offered(target, [])] == [
        ("local-head", ("--draft-head", str(target))),
        ("lookup", ("--no-draft",)),
    ]


def test_sources_are_chosen_by_name(tmp_path: Path) -> None:
    sources = offered(model(tmp_path / "target", num_hidden_layers=4), [model(tmp_path / "small")])
    assert chosen([DrafterName.ALL], sources) == sources
    assert [each.name for each in chosen([DrafterName.LOOKUP, DrafterName.DRAFT], sources)] == ["draft", "lookup"]
    with pytest.raises(ConfigurationError, match="no folder offers --drafter parallel; offered: draft, early-exit"):
        chosen([DrafterName.PARALLEL], sources)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        offered(model(tmp_path / "target"), [tmp_path / "nowhere"])

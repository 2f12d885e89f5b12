"""The page of settings: the flags of the processes, read from the parsers that their entry points use."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from docs.generate.markdown import code, literal, page, sentence, table

PROCESSES: Final = {
    "coordinator": ("Coordinator", "outrider coordinator", "the public API, in front of all workers"),
    "target_worker": ("Target worker", "outrider target-worker", "the large model, which decides"),
    "draft_worker": ("Draft worker", "outrider draft-worker", "the small model, which guesses"),
    "draft_worker.memory": ("Memory worker", "outrider memory-worker", "no model: hints at what was generated before"),
}
ON_VLLM: Final = (
    "Target worker on vLLM",
    "outrider target-worker --engine vllm",
    "the large model, run by vLLM, whose own flags follow behind `--`",
)
ENVIRONMENT: Final = {
    "OUTRIDER_REDIS_URL": "URL of the Redis that holds the registry. It counts before `OUTRIDER_REDIS_URL_FILE`.",
    "OUTRIDER_REDIS_URL_FILE": "File that holds that URL and its password. Other processes can see an environment.",
    "OUTRIDER_HINTS": "Settings of hints in SGLang: JSON, or the path of a file with it.",
    "OUTRIDER_ZONE": "Default of `--zone` of a worker.",
    "OUTRIDER_CACHE_DIR": "Folder of logs and grown models of `outrider demo` and `outrider serve`.",
    "OUTRIDER_API_KEY": "Key that `outrider chat`, `outrider audit` and others send as a bearer token.",
    "OUTRIDER_API_KEYS": "File of API keys of a coordinator that Ray Serve's own configuration starts.",
    "OUTRIDER_OIDC_ISSUER": "Identity provider whose tokens such a coordinator accepts.",
    "OUTRIDER_OIDC_AUDIENCE": "Audience that these tokens have to name.",
    "OUTRIDER_OIDC_JWKS_URL": "Address of the provider's public keys, unless discovery finds it.",
    "OUTRIDER_OIDC_TENANT_CLAIM": "Claim that names the tenant; `sub` if not set.",
    "OUTRIDER_OIDC_CA_FILE": "Authorities of the provider's certificate, if they are not well known.",
    "OUTRIDER_TLS_DIR": "Folder of certificates of such a coordinator.",
    "OUTRIDER_REQUIRE_WORKER_IDS": "`1`: such a coordinator uses no worker whose certificate does not name its id.",
    "OUTRIDER_INSECURE": "`1`: such a coordinator may serve without API keys.",
    "OUTRIDER_METRICS_INSECURE": "`1`: such a coordinator may serve metrics without certificates despite API keys.",
}
"""Variables that operators set. A test compares the names with those that the code reads."""


class _Captured(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(package: str, reader: str = "parse_arguments") -> argparse.ArgumentParser:
    """The parser that `python -m package` reads its command line with; `reader`: the function that does."""

    def capture(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Captured(parser)

    clean = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    entry: Any = importlib.import_module(f"{package}.__main__")
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture),
        mock.patch.object(sys, "argv", [package]),
        mock.patch.dict(os.environ, clean, clear=True),
    ):
        try:
            (getattr(entry, reader, None) or entry.main)()
        except _Captured as captured:
            return captured.parser
    raise RuntimeError(f"{package} does not read its command line with argparse")


def settings_page() -> str:
    """All flags of the processes, and the environment variables."""
    sections = [_process(package, *words) for package, words in PROCESSES.items()]
    sections.insert(2, _process("target_worker", *ON_VLLM, reader="parse_vllm_arguments"))
    variables = table(["Variable", "Meaning"], ((code(name), text) for name, text in ENVIRONMENT.items()))
    return page(
        "Settings",
        "Each process has its own flags. Every flag has a default that works, except the model or tokenizer folder "
        "that a process serves. `outrider serve` starts all of them on one machine; its flags are in "
        "[Command line](cli.md#outrider-serve).",
        *sections,
        f"## Environment variables\n\n{variables}",
    )


def _process(package: str, title: str, command: str, role: str, reader: str = "parse_arguments") -> str:
    parser, again = parser_of(package, reader), parser_of(package, reader)
    random = {
        action.dest
        for action, other in zip(parser._actions, again._actions, strict=True)
        if action.default != other.default
    }
    module = command.replace(PROCESSES[package][1], f"python -m {package}")
    parts = [f"## {title}", f"`{command}` or `{module}`: {role}."]
    groups = [group for group in parser._action_groups if list(_shown(group))]
    for group in groups:
        name = group.title or ""
        if len(groups) > 1:
            is_default = name in ("options", "optional arguments", "positional arguments")
            parts.append(f"### {title}: {'own' if is_default else name}")
        rows = [_row(action, parser, random) for action in _shown(group)]
        parts.append(table(["Flag", "Meaning"], rows))
    return "\n\n".join(parts)


def _shown(group: argparse._ArgumentGroup) -> Iterator[argparse.Action]:
    for action in group._group_actions:
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            yield action


def _row(action: argparse.Action, parser: argparse.ArgumentParser, random: set[str]) -> tuple[str, str]:
    known = {name: getattr(value, "value", value) for name, value in vars(action).items()}
    text = sentence(literal((action.help or "") % (known | {"prog": parser.prog})))
    is_said = "default" in text.lower() or isinstance(action.default, bool)
    if action.required:
        text += " Required."
    elif action.dest in random:
        text += " Default: a random name."
    elif not is_said and action.default not in (None, "", argparse.SUPPRESS) and action.default != []:
        text += f" Default: {code(str(known['default']))}."
    return code(*_spellings(action)), text


def _spellings(action: argparse.Action) -> list[str]:
    names = [name for name in action.option_strings if name.startswith("--")] or action.option_strings
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return list(names)
    choices = [str(getattr(choice, "value", choice)) for choice in action.choices or ()]
    value = "{" + ",".join(choices) + "}" if choices else action.metavar or action.dest.upper()
    return [f"{name} {value}" for name in names] or [str(value)]

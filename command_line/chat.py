"""`outrider chat`: a conversation with a running server, with one line of statistics below each answer."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.text import Text

from command_line.client import (
    CHAT,
    COMPLETIONS,
    Answer,
    ApiError,
    Piece,
    listed_models,
    look_for,
    new_client,
    server_address,
    stream,
)
from command_line.report import print_notes
from command_line.settings import naming
from command_line.terminal import TerminalConsole, print_line
from outrider.errors import ConfigurationError

CTRL_C_STATUS: Final = 128 + 2
BASE_MODEL: Final = (
    "{model} has no chat template, as base models have none: it continues a text and was not trained to converse. "
    "`outrider chat --complete` continues each line instead."
)

# Style by a token's origin, as the API names it.
STYLES: Final[Mapping[str, str]] = {
    "accepted": "bold green", "recovered": "yellow", "bonus": "cyan", "plain": "",
}  # fmt: skip
_MEANINGS: Final[Mapping[str, str]] = {
    "accepted": "the draft's hint, which the target accepted",
    "recovered": "the target's own, instead of a hint that it rejected",
    "bonus": "the target's own, after hints that it all accepted",
    "plain": "the target's own, without a hint",
}


def chat(
    url: Annotated[str, typer.Option(help="Address of the server, as `outrider serve` printed it.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str | None, typer.Option(help="Model to use. Needed if the server has several.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 200,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, max=2.0, help="Sampling temperature. 0 always takes the most likely token."),
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed that makes a sampled answer repeatable.")] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Turn speculation off for these requests.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="API key, sent as a bearer token.")
    ] = None,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="Complete each line instead of holding a conversation. Use it with base models.",
        ),
    ] = False,
) -> None:
    """Chat with a running server. Colours show how each token was generated.

    Ctrl-C stops an answer; at the prompt, Ctrl-C and Ctrl-D end the chat. Lines may also come from a pipe. A base
    model, such as the demo's, was not trained to converse: use --complete to continue a line instead.

    [bold]Exit status[/bold]

    0: the input ended; 1: there is no server, or the last line got no answer; 2: a flag is wrong; 130: Ctrl-C.
    """
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "speculation": {"enabled": not no_speculation, "detail": True},
    }
    body.update({name: value for name, value in (("model", model), ("seed", seed)) if value is not None})
    with naming("--url"):
        address = server_address(url)
    raise typer.Exit(_converse(address, api_key, body, is_completing=complete))


def _converse(address: str, api_key: str | None, body: dict[str, Any], *, is_completing: bool) -> int:
    """Asks line after line and returns the exit status. Raises ConfigurationError for a server that cannot be asked.

    Lines are read while no event loop runs: a signal ends the wait for one at once.
    """
    console, status = TerminalConsole(), 0
    with asyncio.Runner() as runner, closing(_Conversation(runner, address, api_key, body, is_completing)) as asked:
        try:
            asked.find_model(console)
            if sys.stdin.isatty():
                console.print(Text(asked.introduction, "dim"), soft_wrap=True)
            if (shown := legend(console)) is not None:
                console.print(shown, soft_wrap=True)
            while (line := _read_line()) is not None:
                if line.strip():
                    status = asked.ask(line, console)
        except KeyboardInterrupt:
            console.print()
            return CTRL_C_STATUS
    return status


@dataclass
class _Conversation:
    """A connection to the server, and the messages so far."""

    runner: asyncio.Runner
    address: str
    api_key: str | None
    body: dict[str, Any]  # of every request
    is_completing: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    client: httpx.AsyncClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = new_client(self.address, self.api_key)

    def close(self) -> None:
        """Closes the connection."""
        self.runner.run(self.client.aclose())

    @property
    def introduction(self) -> str:
        """One line for a person: who answers, and how to leave."""
        # A template proves nothing: base models, such as the demo's, may have one.
        advice = "" if self.is_completing else " A base model, such as the demo's, needs --complete."
        return f"{self.body['model']} at {self.address}. Ctrl-C stops an answer, Ctrl-D ends the chat.{advice}"

    def find_model(self, console: Console) -> None:
        """Chooses the model, and says so where it cannot converse. Raises ConfigurationError."""
        response = self.runner.run(look_for(self.client, self.address, "OUTRIDER_API_KEY"))
        if "model" in self.body and response.status_code != httpx.codes.OK:
            return  # some servers list none
        models = {entry["id"]: entry for entry in listed_models(response, self.address)}
        if "model" not in self.body and len(models) > 1:
            raise ConfigurationError(f"several models are served there; choose one with --model: {', '.join(models)}")
        name = self.body.setdefault("model", next(iter(models)))
        if name not in models:
            raise ConfigurationError(f"--model {name} is not served there; there is {', '.join(models)}")
        if models[name].get("has_chat_template") is False and not self.is_completing:
            print_notes(console, (), [BASE_MODEL.format(model=name)])

    def ask(self, line: str, console: Console) -> int:
        """Shows the answer to one line. Returns 1 if the server refused it or broke off, else 0."""
        question = {"role": "user", "content": line}
        request = {"prompt": line} if self.is_completing else {"messages": [*self.messages, question]}
        shown: list[Piece] = []

        def on_pieces(pieces: list[Piece]) -> None:
            shown.extend(pieces)
            show(console, pieces)

        path, closing_line = COMPLETIONS if self.is_completing else CHAT, "stopped"
        try:
            answer = self.runner.run(stream(self.client, path, {**self.body, **request}, on_pieces))
            closing_line = summary(answer)
            if answer.finish_reason == "length":
                closing_line += f" · cut off at --max-tokens {self.body['max_tokens']}"
        except KeyboardInterrupt:  # ends this answer only
            pass
        except ApiError as error:
            console.print(Text(f"\n{error.message}", "red"), soft_wrap=True)
            return 1
        self.messages += [question, {"role": "assistant", "content": "".join(piece.text for piece in shown)}]
        console.print(Text(f"\n{closing_line}", "dim"), soft_wrap=True)
        return 0


def _read_line() -> str | None:
    """The next line; None at the end of the input. Only a person at a terminal sees a prompt."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with suppress(ImportError):
        importlib.import_module("readline")  # `input` then edits lines and remembers them
    try:
        return input("> ")
    except EOFError:
        print_line()
        return None


def show(console: Console, pieces: list[Piece]) -> None:
    """Prints tokens as they arrive, each in the colour of its origin."""
    console.print(
        Text.assemble(*((piece.text, STYLES.get(piece.origin, "")) for piece in pieces)),
        end="",
        soft_wrap=True,
    )


def legend(console: Console) -> Text | None:
    """Explains the colours of the tokens; None where the console has none."""
    if console.color_system is None or console.no_color:
        return None
    parts: list[tuple[str, str]] = [("Tokens by colour: ", "dim")]
    for origin, meaning in _MEANINGS.items():
        parts += [("" if len(parts) == 1 else "; ", "dim"), (origin, STYLES[origin]), (f" ({meaning})", "dim")]
    return Text.assemble(*parts)


def summary(answer: Answer) -> str:
    """One line about an answer: length, speed and, if hints were verified, their acceptance."""
    words = [
        f"{answer.num_tokens} tokens",
        f"TTFT {answer.ttft_s * 1e3:.0f} ms",
        f"TPOT {answer.tpot_s * 1e3:.1f} ms",
    ]
    statistics = answer.speculation
    if statistics.get("num_draft_tokens"):
        words.append(f"accepted {statistics['draft_acceptance_rate']:.0%} of {statistics['num_draft_tokens']} hints")
        words.append(f"{statistics['mean_acceptance_length']:.2f} tokens a step")
    return " · ".join(words)

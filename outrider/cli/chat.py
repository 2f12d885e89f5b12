"""`outrider chat`: a conversation with a running server, one line of statistics below each answer."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from outrider.cli.client import Answer, ApiError, Piece, new_client, stream
from outrider.cli.report import STYLES, legend

_CHAT_PATH, _COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


def chat(
    url: Annotated[str, typer.Option(help="Address of the server, as `outrider serve` printed it.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; needed where several are served.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always says the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes a sampled answer repeatable.")] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Ask the server not to listen to hints.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="OUTRIDER_API_KEY", help="Sent as a bearer token.")
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Continue each line instead of holding a conversation.")
    ] = False,
) -> None:
    """Talk to a running server; answers are coloured by how each token came to be. Ctrl-D ends it.

    A base model, the demo's for one, was never taught to converse: use --complete to have it go on from a line.
    """
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "speculation": {"enabled": not no_speculation, "detail": True},
    }
    body.update({name: value for name, value in (("model", model), ("seed", seed)) if value is not None})
    asyncio.run(_converse(url, api_key, body, is_completing=complete))


async def _converse(url: str, api_key: str | None, body: dict[str, Any], *, is_completing: bool) -> None:
    console = Console(highlight=False)
    messages: list[dict[str, str]] = []
    async with new_client(url, api_key) as client:
        console.print(legend(), soft_wrap=True)
        while True:
            line = await asyncio.to_thread(_read_line, console)
            if line is None:
                return
            if not line.strip():
                continue
            asked = (
                {"prompt": line}
                if is_completing
                else {"messages": [*messages, {"role": "user", "content": line}]}
            )
            path = _COMPLETION_PATH if is_completing else _CHAT_PATH
            try:
                answer = await stream(client, path, {**body, **asked}, lambda pieces: show(console, pieces))
            except ApiError as error:
                console.print(Text(f"\n{error.message}", "red"))
                continue
            messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer.text}]
            console.print(Text(f"\n{summary(answer)}", "dim"), soft_wrap=True)


def _read_line(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/bold]")
    except (EOFError, KeyboardInterrupt):
        return None


def show(console: Console, pieces: list[Piece]) -> None:
    """Prints tokens as they come, each in the colour of its origin."""
    console.print(
        Text.assemble(*((piece.text, STYLES.get(piece.origin, "")) for piece in pieces)),
        end="",
        soft_wrap=True,
    )


def summary(answer: Answer) -> str:
    """One line about an answer: length, pace and, where hints were verified, what became of them."""
    words = [
        f"{answer.num_tokens} tokens",
        f"TTFT {answer.ttft_s * 1e3:.0f} ms",
        f"TPOT {answer.tpot_s * 1e3:.1f} ms",
    ]
    statistics = answer.speculation
    if statistics.get("num_draft_tokens"):
        words.append(
            f"accepted {statistics['draft_acceptance_rate']:.0%} of {statistics['num_draft_tokens']} hints"
        )
        words.append(f"{statistics['mean_acceptance_length']:.2f} tokens a step")
    return " · ".join(words)

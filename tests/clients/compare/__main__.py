"""`python -m tests.clients.compare`: asks Outrider and vLLM the same, and fails for differences not documented."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gzip
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tests.clients.compare.asking import ask
from tests.clients.compare.chats import chats
from tests.clients.compare.comparing import Answer, Difference, differences
from tests.clients.compare.completions import completions
from tests.clients.compare.documented import counts, load, outdated, page, undocumented
from tests.clients.compare.kinds import MODEL, Kind
from tests.clients.compare.others import others
from tests.e2e.system import running_system

FOLDER: Final = Path(__file__).resolve().parent
TEMPLATE: Final = FOLDER / "chat_template.jinja"
DOCUMENTED: Final = FOLDER / "documented.toml"
VLLM_VERSION: Final = "0.32.0"
ANSWERS: Final = FOLDER / f"vllm-{VLLM_VERSION}.json.gz"
PAGE: Final = FOLDER.parents[2] / "docs" / "reference" / "differences-from-vllm.md"


def all_kinds() -> list[Kind]:
    """Every kind of request."""
    return [*completions(), *chats(), *others()]


def page_text() -> str:
    """The page as it must be today."""
    return page(load(DOCUMENTED.read_text(encoding="utf-8")), num_kinds=len(all_kinds()), version=VLLM_VERSION)


def save(answers: Mapping[str, Answer], path: Path) -> None:
    """Writes answers, compressed; the same answers make the same bytes."""
    text = json.dumps({name: asdict(answer) for name, answer in answers.items()}, sort_keys=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> dict[str, Answer]:
    """Answers that `save` wrote."""
    saved = json.loads(gzip.decompress(path.read_bytes()))
    return {
        name: Answer(**{**value, "events": None if value["events"] is None else tuple(value["events"])})
        for name, value in saved.items()
    }


def report(found: list[Difference], *, is_whole: bool) -> int:
    """Prints what differs and is not documented, and entries that no longer occur; the exit code."""
    entries = load(DOCUMENTED.read_text(encoding="utf-8"))
    keys = {each.key for each in found}
    new = set(undocumented(keys, entries))
    for each in found:
        if each.key in new:
            print(f"not documented: {each.key}\n    ours:   {each.ours}\n    theirs: {each.theirs}")
    gone = outdated(keys, entries) if is_whole else []
    for pattern in gone:
        print(f"no longer occurs: {pattern}")
    groups = ", ".join(f"{name} {number}" for name, number in counts(keys, entries).items() if number)
    print(f"{len(keys)} differences ({groups}); {len(new)} not documented, {len(gone)} entries no longer occur")
    return 1 if new or gone else 0


@contextlib.contextmanager
def outrider_at(url: str | None) -> Iterator[str]:
    """The address of an Outrider that runs already, else of one that is started here with the demo pair."""
    if url:
        yield url
        return
    words = ("--dtype", "float32", "--served-model-name", MODEL, "--chat-template", str(TEMPLATE))
    with tempfile.TemporaryDirectory(prefix="outrider-compare-") as folder:
        print("starting outrider serve with the demo pair", flush=True)
        with running_system(Path(folder) / "serve", *words) as system:
            yield system.url


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.compare", description=__doc__)
    parser.add_argument("--outrider-url", metavar="URL", help="address of an Outrider, instead of one started here")
    parser.add_argument("--vllm-url", metavar="URL", help="vLLM's address, instead of its saved answers")
    parser.add_argument("--save", action="store_true", help=f"save the answers of --vllm-url in {ANSWERS.name}")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="only requests of these names")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} from {DOCUMENTED.name}")
    chosen = parser.parse_args()
    if chosen.write:
        PAGE.write_text(page_text(), encoding="utf-8")
        return 0
    if chosen.save and (not chosen.vllm_url or chosen.only != "*"):
        parser.error("--save needs --vllm-url, and all requests")
    kinds = [kind for kind in all_kinds() if fnmatch.fnmatchcase(kind.name, chosen.only)]
    theirs = {kind.name: ask(chosen.vllm_url, kind) for kind in kinds} if chosen.vllm_url else read(ANSWERS)
    if chosen.save:
        save(theirs, ANSWERS)
    found: list[Difference] = []
    statuses: Counter[int] = Counter()
    with outrider_at(chosen.outrider_url) as url:
        for kind in kinds:
            ours = ask(url, kind)
            statuses[ours.status] += 1
            found += differences(kind.name, ours, theirs[kind.name], compares_text=kind.compares_text)
    print(f"{len(kinds)} kinds of requests, our statuses {dict(sorted(statuses.items()))}")
    return report(found, is_whole=chosen.only == "*")


if __name__ == "__main__":
    sys.exit(main())

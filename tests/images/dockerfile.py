"""Dockerfiles as far as ours go: stages of instructions, with build arguments filled in. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line, its continuations joined: COPY --from=build /app /app."""

    keyword: str  # in capitals
    flags: Mapping[str, str]  # {"from": "build"}
    value: str  # the rest

    @property
    def words(self) -> list[str]:
        """The value's words, of the JSON form and of the plain one."""
        if self.value.startswith("["):
            return [str(word) for word in json.loads(self.value)]
        return shlex.split(self.value)


@dataclass(frozen=True, slots=True)
class Stage:
    """From one FROM to the next."""

    name: str  # "" for a last one without a name
    base: str  # an image, or the name of an earlier stage
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, keyword: str) -> list[Instruction]:
        return [each for each in self.instructions if each.keyword == keyword]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the stage's own ENV instructions set."""
        pairs = [word.partition("=") for each in self.of("ENV") for word in each.words]
        return {name: value for name, _, value in pairs}


def parse(text: str, arguments: Mapping[str, str] | None = None) -> list[Stage]:
    """The stages. Raises ValueError for an instruction before the first FROM other than ARG."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    filled = dict(arguments or {})
    stages: list[Stage] = []
    for line in joined.splitlines():
        keyword, _, rest = line.partition(" ")
        if keyword == "ARG":
            name, _, default = rest.partition("=")
            filled.setdefault(name, default)
        if keyword in ("FROM", "COPY"):  # in RUN the shell does it
            rest = re.sub(r"\$\{(\w+)\}", lambda found: filled[found[1]], rest)
        flags = dict(re.findall(r"--([\w-]+)=(\S+)\s", re.match(r"(?:--\S+\s+)*", rest)[0]))  # type: ignore[index]
        value = re.sub(r"^(?:--\S+\s+)*", "", rest)
        if keyword == "FROM":
            base, _, name = value.partition(" AS ")
            stages.append(Stage(name, base))
        elif stages:
            stages[-1].instructions.append(Instruction(keyword, flags, value))
        elif keyword != "ARG":
            raise ValueError(f"{keyword} before FROM")
    return stages


def lineage(stages: list[Stage], stage: Stage) -> list[Stage]:
    """The stage and those that it is built upon, itself last."""
    by_name = {each.name: each for each in stages if each.name}
    above = [stage]
    while above[0].base in by_name:
        above.insert(0, by_name[above[0].base])
    return above

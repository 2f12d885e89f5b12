"""Somebody who runs one batch after the other at the public address while things break, and reads every result.

Each line must end exactly once, with the right text. A line may fail only because its runs cost targets or
coordinators, and a batch may be unknown only after Redis has lost its data. Half of the batches have lines of so many
sequences that these would fill a replica, were they to count as other requests do: nobody may be refused for them.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from types import TracebackType
from typing import Any, Final, Self

import httpx

from tests.e2e.chaos.cases import Case
from tests.e2e.chaos.verdict import SEVERITY, Answer, Choice, Kind, Verdict

LINES: Final = 10
CROWD: Final = 16
"""Sequences of a line that takes up much room. All of them have the same text, because the line is greedy."""
NO_ROOM: Final = "serves its most"
"""Part of the refusal of a request for which a replica has no room. Without batches there is always room."""
CALL_S_MAX: Final = 180.0
"""Time for one call, with all of its tries."""
BATCH_S_MAX: Final = 900.0
"""Time for a batch. Lines wait while requests fill the targets."""
EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 20.0
_OVER: Final = ("completed", "failed", "expired", "cancelled")
_PASSING: Final = frozenset({429, 502, 503, 504})
LOST_CODES: Final = frozenset({"poisonous_request", "unavailable", "request_lost"})
"""Codes of lines that failed because processes were lost that had them."""

Judge = Callable[[Case, Answer], Verdict]


@dataclass
class BatchTable:
    """Results of all batches."""

    num_batches: int = 0  # that ended
    num_forgotten: int = 0  # with the data of Redis
    num_lines: int = 0  # of those that ended
    num_lines_lost: int = 0  # that failed because of lost processes
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_batches} batches of {self.num_lines} lines, of which {self.num_lines_lost} failed for lost "
            f"processes; {self.num_forgotten} batches went with the data of Redis."
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Forgotten(Exception):
    """The server does not know a batch or a file that it had."""


class BatchClient:
    """Runs batches while the context is open."""

    def __init__(self, url: str, key: str, trust: ssl.SSLContext, judge: Judge, emptied_s: Callable[[], float]) -> None:
        """`emptied_s` tells the last time, by the monotonic clock, at which Redis may have lost its data."""
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, verify=trust, timeout=_TIMEOUT_S, trust_env=False)
        self._judge = judge
        self._emptied_s = emptied_s
        self._is_crowded = False
        self.table = BatchTable()

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def run(self, cases: Sequence[Case], rng: Random) -> None:
        """Runs one batch of cases drawn at random, judges its results and deletes its files."""
        self._is_crowded = not self._is_crowded
        drawn = [crowd(cases)] * LINES if self._is_crowded else rng.choices(cases, k=LINES)
        chosen = {f"{number} {case.name}": case for number, case in enumerate(drawn)}
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(BATCH_S_MAX):
                batch = await self._run(chosen, began_s)
        except Forgotten as error:
            self.table.num_forgotten += 1
            if self._emptied_s() < began_s:
                self.table.failures.append(f"forgotten, and Redis had its data all the time: {error}")
        except TimeoutError:
            self.table.failures.append(f"a batch of {LINES} lines was not over after {BATCH_S_MAX:g} s")
        except httpx.HTTPError as error:
            self.table.failures.append(f"{type(error).__name__}: {error}")
        else:
            self.table.num_batches += 1
            self.table.num_lines += LINES
            self.table.num_lines_lost += batch["request_counts"]["failed"]

    async def _run(self, chosen: Mapping[str, Case], began_s: float) -> dict[str, Any]:
        content = "\n".join(json.dumps(line(custom_id, case)) for custom_id, case in chosen.items())
        files = {"file": ("lines.jsonl", content.encode())}
        file = (await self._call("POST", "/v1/files", files=files, data={"purpose": "batch"})).json()
        batch = await self._create(file["id"])
        while batch["status"] not in _OVER:
            await asyncio.sleep(EVERY_S)
            batch = (await self._call("GET", f"/v1/batches/{batch['id']}")).json()
        if batch["status"] != "completed":
            self.table.failures.append(f"a batch is {batch['status']}: {batch['errors']}")
        output, errors = [await self._results(batch[f"{kind}_file_id"]) for kind in ("output", "error")]
        self.table.failures += judged(chosen, output, errors, self._judge, began_s)
        counts = batch["request_counts"]
        if (counts["completed"], counts["failed"]) != (len(output), len(errors)):
            self.table.failures.append(f"{counts}, with {len(output)} results and {len(errors)} errors")
        for name in (file["id"], batch["output_file_id"], batch["error_file_id"]):
            if name is not None:
                await self._call("DELETE", f"/v1/files/{name}", may_be_gone=True)
        return batch

    async def _create(self, file_id: str) -> dict[str, Any]:
        """Creates the batch once, though an answer may be lost: its metadata tells whether it is there."""
        job = uuid.uuid4().hex
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        deadline_s = time.monotonic() + CALL_S_MAX
        while True:
            try:
                response = await self._http.post("/v1/batches", json=body | {"metadata": {"job": job}})
                if response.status_code not in _PASSING or time.monotonic() > deadline_s:
                    return dict(_checked(response).json())
            except httpx.TransportError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(EVERY_S)
            found = (await self._call("GET", "/v1/batches?limit=20")).json()["data"]
            for batch in found:
                if (batch["metadata"] or {}).get("job") == job:
                    return dict(batch)

    async def _results(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [
            json.loads(each) for each in (await self._call("GET", f"/v1/files/{file_id}/content")).text.splitlines()
        ]

    async def _call(self, method: str, path: str, *, may_be_gone: bool = False, **body: Any) -> httpx.Response:
        """An answer, tried for again where a connection breaks or the system says that it cannot now. Raises
        Forgotten."""
        deadline_s = time.monotonic() + CALL_S_MAX
        while True:
            try:
                response = await self._http.request(method, path, **body)
                is_gone = may_be_gone and response.status_code == httpx.codes.NOT_FOUND
                if response.status_code not in _PASSING or time.monotonic() > deadline_s:
                    return response if is_gone else _checked(response)
            except httpx.TransportError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(EVERY_S)


def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code == httpx.codes.NOT_FOUND:
        raise Forgotten(response.text[:300])
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"{response.status_code} {response.text[:300]}", request=response.request, response=response
        )
    return response


def line(custom_id: str, case: Case) -> dict[str, Any]:
    """The line of a batch that asks for a case."""
    body = {name: value for name, value in case.body().items() if name != "stream"}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def crowd(cases: Sequence[Case]) -> Case:
    """A case of many sequences, made of the shortest greedy one."""
    plain = (
        case for case in cases if case.n == 1 and "seed" not in case.sampling and not case.schema and not case.regex
    )
    return replace(min(plain, key=lambda case: case.max_tokens), n=CROWD)


def refused_for_room(answer: Answer) -> list[str]:
    """Refusals of a request because its replica had no room."""
    told = [*(each.words for each in answer.incidents if each.is_refusal), answer.error or ""]
    return [words for words in told if NO_ROOM in words]


def _judge_each(judge: Judge, case: Case, answer: Answer) -> Verdict:
    """Judges the sequences of a line; those of one that takes up much room one by one."""
    if case.n < CROWD:
        return judge(case, answer)
    if len(answer.choices) != case.n:
        return Verdict(Kind.WRONG, 1, f"{len(answer.choices)} choices of {case.n}")
    verdicts = [judge(replace(case, n=1), replace(answer, choices=[choice])) for choice in answer.choices]
    return max(verdicts, key=lambda verdict: SEVERITY[verdict.kind])


def judged(
    chosen: Mapping[str, Case],
    output: Iterable[Mapping[str, Any]],
    errors: Iterable[Mapping[str, Any]],
    judge: Judge,
    began_s: float = 0.0,
) -> list[str]:
    """Returns descriptions of the mistakes in the results of these lines. `began_s` is when they were asked for."""
    output, errors = list(output), list(errors)
    ended = Counter(str(each["custom_id"]) for each in (*output, *errors))
    found = [f"line {name} ended {ended[name]} times" for name in sorted({*chosen, *ended}) if ended[name] != 1]
    found += [f"line {name} was not asked for" for name in sorted(ended.keys() - chosen.keys())]
    for each in output:
        if (case := chosen.get(each["custom_id"])) is not None:
            verdict = _judge_each(judge, case, _answer(each["response"]["body"], began_s))
            if verdict.kind is not Kind.RIGHT:
                found.append(f"line {each['custom_id']}: {verdict.kind.value}: {verdict.detail}")
    for each in errors:
        error = each["error"] or each["response"]["body"]["error"]
        if error["code"] not in LOST_CODES:
            found.append(f"line {each['custom_id']} failed: {error['code']}: {error['message']}")
    return found


def _answer(body: Mapping[str, Any], asked_s: float) -> Answer:
    choices = [
        Choice(each["token_ids"], each["text"], each["finish_reason"], each["stop_reason"], has_begun=True)
        for each in sorted(body["choices"], key=lambda each: int(each["index"]))
    ]
    return Answer(asked_s, choices, ended_s=time.monotonic())

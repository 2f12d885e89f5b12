"""Sends each request plainly and with speculation, and replays it where the answers differ.

The order per request is fixed: the plain run, then the speculated runs one after another, and after each that differs
the replays that show the cause. Requests may run concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httpx

from command_line.audit.findings import Finding, RequestReport, Surroundings
from command_line.audit.requests import (
    AuditRequest,
    ReplayWay,
    can_show_the_end,
    read_run,
    replay_body,
    replay_way,
    run_body,
)
from command_line.client import ApiError, error_text
from outrider.audit import Divergence, Run, Verdict, compare, is_reproduced, judge, margin, weigh

NUM_TOKENS_BEFORE, NUM_TOKENS_AFTER = 24, 8  # shown around a divergence
NUM_RANKED = 5  # most likely tokens shown there


class Auditor:
    """Auditor of one server. `on_progress` gets a line about each run."""

    def __init__(self, client: httpx.AsyncClient, num_repeats: int, on_progress: Callable[[str], None]) -> None:
        self._client = client
        self._num_repeats = num_repeats
        self._on_progress = on_progress

    async def audit(self, request: AuditRequest) -> RequestReport:
        """Audits one request. Errors of the server become part of the report."""
        report = RequestReport(request)
        try:
            self._on_progress(f"{request.name}: plain.")
            report.plain = await self._ask(request.path, run_body(request, enabled=False))
            _check_reference(report.plain)
            for number in range(1, self._num_repeats + 1):
                self._on_progress(f"{request.name}: with speculation, run {number} of {self._num_repeats}.")
                speculated = await self._ask(request.path, run_body(request, enabled=True))
                divergence = compare(report.plain, speculated)
                if divergence is None:
                    report.findings.append(Finding(number, speculated, Verdict.IDENTICAL))
                    continue
                finding = Finding(number, speculated, Verdict.FAILED, divergence)
                report.findings.append(finding)
                self._on_progress(f"{request.name}: the answers differ, replaying.")
                await self._investigate(request, report.plain, divergence, finding)
        except ApiError as error:
            report.message = error.message
        return report

    async def _investigate(self, request: AuditRequest, plain: Run, divergence: Divergence, finding: Finding) -> None:
        """Replays, decides the verdict and collects details of the divergence. Raises ApiError only before the
        verdict."""
        position = divergence.position
        way = finding.way = replay_way(request, plain, divergence)
        first = "processed" if plain.is_exact else "raw"  # vLLM serves the one that it was started for
        replays = [await self._replay(request, plain, position, way, mode=first)]
        _conclude(plain, divergence, finding, replays)
        try:
            if way is ReplayWay.WHOLE:
                shown = await self._show_the_end(request, plain, position, first)
            else:
                replays.append(await self._replay(request, plain, position, way, mode="raw"))
                shown = tuple(replays)
                _conclude(plain, divergence, finding, replays)
            if shown:
                processed, raw = (each.weights_at(position) for each in shown)
                finding.margins = {"processed": margin(divergence, processed), "raw": margin(divergence, raw)}
                finding.ranked = processed.ranked[:NUM_RANKED] if processed is not None else []
                finding.verdict = weigh(finding.verdict, plain, finding.margins["processed"])
            finding.surroundings = await self._surroundings(plain, finding, divergence)
        except ApiError as error:  # one detail is missing; the verdict stands
            finding.verdict = weigh(finding.verdict, plain, finding.margins.get("processed"))
            finding.notes.append(f"not everything could be found out: {error.message}")

    async def _show_the_end(self, request: AuditRequest, plain: Run, position: int, first: str) -> tuple[Run, ...]:
        """Replays, the `first` mode and raw, that show the token that ended the plain run; none if there is no way."""
        if not can_show_the_end(request, plain):
            return ()
        way = ReplayWay.PREFIX
        return (
            await self._replay(request, plain, position, way, mode=first, goes_on=True),
            await self._replay(request, plain, position, way, mode="raw", goes_on=True),
        )

    async def _replay(
        self,
        request: AuditRequest,
        plain: Run,
        position: int,
        way: ReplayWay,
        *,
        mode: str,
        goes_on: bool = False,
    ) -> Run:
        """A plain run up to `position`, mapped back to the original request."""
        path, body = replay_body(request, plain, position, way, mode=mode, goes_on=goes_on)
        run = await self._ask(path, body)
        if way is not ReplayWay.PREFIX:
            return run
        return Run(
            token_ids=plain.token_ids[:position] + run.token_ids,
            finish_reason=run.finish_reason,
            weights=run.weights,
        )

    async def _surroundings(self, plain: Run, finding: Finding, divergence: Divergence) -> Surroundings:
        """The tokens around the divergence, decoded."""
        position = divergence.position
        concerned = (divergence.plain_token_id, divergence.speculated_token_id, finding.replay_token_id)
        token_ids = {token_id for token_id in concerned if token_id is not None}
        token_ids |= {token_id for token_id, _ in finding.ranked}
        before = (*plain.prompt_token_ids, *plain.token_ids[:position])[-NUM_TOKENS_BEFORE:]
        end = position + NUM_TOKENS_AFTER
        return Surroundings(
            before=await self._text(before),
            plain=await self._text(plain.token_ids[position:end]),
            speculated=await self._text(finding.run.token_ids[position:end]),
            tokens={each: await self._text((each,)) for each in sorted(token_ids)},
        )

    async def _text(self, token_ids: tuple[int, ...]) -> str:
        answer = await self._post("/detokenize", {"tokens": list(token_ids)}) if token_ids else {"prompt": ""}
        return str(answer.get("prompt", "")) if isinstance(answer, dict) else ""

    async def _ask(self, path: str, body: dict[str, Any]) -> Run:
        return read_run(await self._post(path, body))

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """POSTs a request. Raises ApiError for a refusal, an unreachable server or an answer that is not JSON."""
        try:
            response = await self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise ApiError(f"{self._client.base_url}: {str(error) or type(error).__name__}") from error
        if response.status_code != httpx.codes.OK:
            raise ApiError(f"{response.status_code}: {error_text(response.content)}")
        try:
            return response.json()
        except ValueError as error:
            raise ApiError(f"{path} did not answer with JSON") from error


def _conclude(plain: Run, divergence: Divergence, finding: Finding, replays: Sequence[Run]) -> None:
    """The verdict and the token that decided it: of the first replay that contradicts the plain run, if one does."""
    position = divergence.position
    contradictions = [each for each in replays if not is_reproduced(plain, divergence, each)]
    said = (contradictions or replays)[0]
    finding.verdict = judge(plain, divergence, replays)
    finding.replay_token_id = said.token_at(position)
    if divergence.plain_token_id == divergence.speculated_token_id:  # both ended there
        finding.agrees_with_replay = compare(said, finding.run) is None
    else:
        end = position + 1
        finding.agrees_with_replay = said.token_ids[:end] == finding.run.token_ids[:end]


def _check_reference(plain: Run) -> None:
    """Raises ApiError if the run cannot serve as a reference."""
    if plain.hints.num_draft_tokens:
        raise ApiError(
            f"the server verified {plain.hints.num_draft_tokens} hints in the run that asked for none, so there is "
            "nothing to compare with"
        )
    if plain.decoding_mode == "rejection":
        if not plain.is_exact:
            raise ApiError(
                "the server promises the distribution of sampled outputs, and not their tokens, seed or none: audit it "
                "with --temperature 0"
            )
        raise ApiError(
            "the server uses rejection sampling in spite of the seed: the distribution is the target's, but two "
            "outputs differ by design"
        )

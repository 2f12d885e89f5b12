"""Sampled requests with hints in every step keep plain vLLM's distribution: 200,000 draws at temperature 1.

The reference is plain vLLM's own probability of every token at every place of what was drawn, so that each draw counts,
whatever its context. What is tested is how often each token followed each other one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chi2

from tests.engines.sampled_draws import PROMPT_LEN, WAYS
from tests.engines.small_model import VOCAB_SIZE, write_small_model
from tests.engines.vllm_server import PYTHON, ROOT, environment, needs_vllm

Floats = npt.NDArray[np.float64]
ALPHA = 1e-4
"""Error rate of each comparison: one run of 2500 would fail by chance."""
LEAST_EXPECTED = 10.0
"""Tokens that are expected more rarely in a group share one cell."""


def probabilities(
    logprobs: npt.NDArray[np.float32], *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Floats:
    """Returns what sampling draws from. logprobs: [num_draws, vocabulary], of the model itself."""
    scaled = logprobs.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    order = np.argsort(-probs, axis=1, kind="stable")
    ordered = np.take_along_axis(probs, order, axis=1)
    if top_k:
        ordered[:, top_k:] = 0.0
    ordered /= ordered.sum(axis=1, keepdims=True)
    before = ordered.cumsum(axis=1) - ordered
    ordered[before >= top_p] = 0.0
    found = np.zeros_like(probs)
    np.put_along_axis(found, order, ordered / ordered.sum(axis=1, keepdims=True), axis=1)
    return found


def chi_square(groups: npt.NDArray[np.int32], drawn: npt.NDArray[np.int32], probs: Floats) -> tuple[float, int]:
    """Statistic and degrees of freedom of draws from different distributions, whose counts in a group are compared with
    their expectation by the covariance of the counts. groups, drawn: [num_draws]; probs: [num_draws, vocabulary]."""
    statistic, freedom = 0.0, 0
    for group in np.unique(groups):
        own = probs[groups == group]
        seen = np.bincount(drawn[groups == group], minlength=own.shape[1]).astype(np.float64)
        is_frequent = own.sum(axis=0) >= LEAST_EXPECTED
        cells = np.vstack([np.eye(own.shape[1])[is_frequent], ~is_frequent]).astype(np.float64)
        own, seen = own @ cells.T, cells @ seen
        covariance = np.diag(own.sum(axis=0)) - own.T @ own
        difference = seen - own.sum(axis=0)
        inverse = np.linalg.pinv(covariance, rcond=1e-9, hermitian=True)
        statistic += float(difference @ inverse @ difference)
        freedom += int(np.linalg.matrix_rank(covariance, tol=1e-9 * np.abs(covariance).max(), hermitian=True))
    return statistic, freedom


def p_value(groups: npt.NDArray[np.int32], drawn: npt.NDArray[np.int32], probs: Floats) -> float:
    return float(chi2.sf(*chi_square(groups, drawn, probs)))


def draws(rng: np.random.Generator, probs: Floats) -> npt.NDArray[np.int32]:
    found: npt.NDArray[np.int32] = (probs.cumsum(axis=1) < rng.random((len(probs), 1))).sum(axis=1).astype(np.int32)
    return found


def test_the_statistic_accepts_what_is_right_and_sees_hints_that_are_accepted_too_often() -> None:
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.full(VOCAB_SIZE, 0.4), 20000)
    groups = rng.integers(0, VOCAB_SIZE, 20000).astype(np.int32)
    right = [p_value(groups, draws(rng, probs), probs) for _ in range(40)]
    assert min(right) > ALPHA
    assert 0.3 < np.mean(right) < 0.7, "values of a right sampler are spread evenly"
    wrong = draws(rng, probs)
    is_hinted = rng.random(len(wrong)) < 0.03
    wrong[is_hinted] = (groups[is_hinted] + 1) % VOCAB_SIZE
    assert p_value(groups, wrong, probs) < ALPHA


def test_top_k_and_top_p_are_those_of_vllm() -> None:
    logprobs = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    assert probabilities(logprobs, temperature=1.0, top_k=2)[0] == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert probabilities(logprobs, temperature=1.0, top_p=0.7)[0] == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=1e-6)
    assert probabilities(logprobs, temperature=1.0, top_p=0.75)[0] == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9])


@needs_vllm
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["hinted", "plain"])
def test_draws_follow_the_distribution_of_plain_vllm(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """`plain` shows that the reference and the statistic are right."""
    model, file = tmp_path / "model", tmp_path / "draws.npz"
    write_small_model(model)
    num_draws = 200_000 if kind == "hinted" else 40_000
    words = [PYTHON, "-m", "tests.engines.sampled_draws", str(model), str(num_draws), kind, str(file)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=1700)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = {}
    with np.load(file) as arrays:
        for way, parameters in WAYS.items():
            tokens = arrays[f"{way}_tokens"]
            drawn, last = tokens[:, PROMPT_LEN:].ravel(), tokens[:, PROMPT_LEN - 1 : -1].ravel()
            logprobs = arrays[f"{way}_logprobs"].reshape(len(drawn), -1)
            probs = probabilities(logprobs, **parameters)  # type: ignore[arg-type]
            assert probs[np.arange(len(drawn)), drawn].min() > 0.0, f"{way}: a token that it excludes"
            found[way] = {"draws": len(drawn), "p": p_value(last, drawn, probs)}
            other = probabilities(logprobs, temperature=1.1 * parameters["temperature"])
            assert p_value(last, drawn, other) < ALPHA, "the test sees a temperature that is off by a tenth"
        verified, accepted = int(arrays["verified"]), int(arrays["accepted"])
    found |= {"verified": verified, "accepted": accepted}
    record_property("found", found)
    print(kind, found)
    assert found["temperature"]["draws"] >= num_draws
    assert all(found[way]["p"] > ALPHA for way in WAYS), found
    if kind == "plain":
        assert verified == 0
    else:
        assert verified > num_draws
        assert 0.1 < accepted / verified < 0.9

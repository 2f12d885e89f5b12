"""Confidence intervals and confidence sequences of measurements. Pure.

For a table that is read once: confidence intervals of ratios of sums over clusters (Cochran, Sampling Techniques,
1977, 6.4) and their differences (Welch, 1947), of shares (Wilson, 1927), and of quantiles, from order statistics.

For a rule that is evaluated repeatedly: a test made for a single evaluation would reject sooner or later by chance.
`contrast_bounds` is a confidence sequence, which holds at all times at once: Robbins' normal mixture (1970) with the
variance as estimated so far, which is valid in the limit of many clusters (Waudby-Smith et al., 2103.06476; mSPRT,
Johari et al., 1512.04922, are the same bounds read as a test), with Student's tails where they are few.
`imbalance_evidence` needs no limit: it is a mixture of likelihood ratios, which under the null hypothesis ever reaches
1/alpha with a probability of at most alpha (Ville, 1939).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Self

_NORMAL: Final = NormalDist()
DEGREES_MIN: Final = 5.0
"""Fewer degrees of freedom do not determine a variance."""
_TUNED_FOR: Final = 0.025
"""Standard error, relative to the control's mean, at which a confidence sequence is narrowest: it resolves 10 %."""
_DEVIATIONS_MAX: Final = 12.0
_EXPONENT_MAX: Final = 700.0


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval; None where a side is unknown."""

    low: float | None
    high: float | None


_UNKNOWN: Final = Interval(None, None)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The sum of one quantity over the sum of another, such as milliseconds over requests: a mean, or a rate.

    The independent units are clusters, groups of request keys: requests of one key resemble each other, so that many
    requests of few keys tell little. The variance is that of a ratio of cluster totals (Cochran, 6.4).
    """

    whole: float  # sum of the divisor; 0: no data
    value: float
    variance: float  # of `value`; 0 with fewer than two clusters
    degrees: float  # of freedom of `variance`: clusters less 1, fewer where some dominate

    @classmethod
    def of_clusters(cls, totals: Iterable[tuple[float, float]]) -> Self:
        """Builds a ratio from the dividend and divisor of each cluster."""
        pairs = [pair for pair in totals if pair[1]]
        whole = math.fsum(divisor for _, divisor in pairs)
        if not pairs:
            return cls(0.0, 0.0, 0.0, 0.0)
        value = math.fsum(dividend for dividend, _ in pairs) / whole
        if len(pairs) < 2:
            return cls(whole, value, 0.0, 0.0)
        residuals = math.fsum((dividend - value * divisor) ** 2 for dividend, divisor in pairs)
        variance = residuals / whole**2 * len(pairs) / (len(pairs) - 1)
        # Satterthwaite's, where keys differ in their means: a cluster's weight in the variance is its squared size.
        weights = [divisor**2 for _, divisor in pairs]
        degrees = sum(weights) ** 2 / sum(weight**2 for weight in weights) - 1
        return cls(whole, value, variance, degrees)


def student_of_normal(z: float, degrees: float) -> float:
    """The quantile of Student's t that corresponds to the normal quantile `z` (Wallace, 1959): accurate to 1 % up to 3
    from five degrees of freedom on, and too large with fewer."""
    scaled = z * (8 * degrees + 3) / (8 * degrees + 1)
    exponent = min(scaled * scaled / degrees, _EXPONENT_MAX)
    return math.copysign(math.sqrt(degrees * math.expm1(exponent)), z)


def ratio_interval(ratio: Ratio, confidence: float) -> Interval:
    """Confidence interval of the ratio in the population of clusters."""
    if ratio.degrees < DEGREES_MIN:
        return _UNKNOWN
    half = _student_quantile(confidence, ratio.degrees) * math.sqrt(ratio.variance)
    return Interval(ratio.value - half, ratio.value + half)


def difference_interval(first: Ratio, second: Ratio, confidence: float) -> Interval:
    """Confidence interval of the first ratio less the second; their variances may differ (Welch)."""
    if min(first.degrees, second.degrees) < DEGREES_MIN:
        return _UNKNOWN
    variance, degrees = _contrast(first, second, 1.0)
    half = _student_quantile(confidence, degrees) * math.sqrt(variance)
    difference = first.value - second.value
    return Interval(difference - half, difference + half)


def _student_quantile(confidence: float, degrees: float) -> float:
    return student_of_normal(_NORMAL.inv_cdf((1 + confidence) / 2), degrees)


def _contrast(first: Ratio, second: Ratio, factor: float) -> tuple[float, float]:
    """Variance of the first less `factor` times the second, and its degrees of freedom (Welch)."""
    parts = (first.variance, factor * factor * second.variance)
    variance = sum(parts)
    spread = parts[0] ** 2 / first.degrees + parts[1] ** 2 / second.degrees
    return variance, variance**2 / spread if spread else first.degrees + second.degrees


def share_interval(num: int, num_all: int, confidence: float) -> Interval:
    """Confidence interval of the probability of an event that happened `num` times of `num_all` (Wilson)."""
    if not num_all:
        return _UNKNOWN
    z2 = _NORMAL.inv_cdf((1 + confidence) / 2) ** 2
    share, scale = num / num_all, 1 + z2 / num_all
    middle = (share + z2 / (2 * num_all)) / scale
    half = math.sqrt(z2 * share * (1 - share) / num_all + z2 * z2 / (4 * num_all * num_all)) / scale
    return Interval(max(middle - half, 0.0), min(middle + half, 1.0))


def rank_bounds(num: int, share: float, confidence: float) -> tuple[int | None, int | None]:
    """Ranks, from 1, of the values that enclose a quantile; each misses it with at most half of 1 - confidence.

    The number of `num` values below the quantile is binomial. None where even the smallest, or the largest, value might
    be on the wrong side.
    """
    tail = (1 - confidence) / 2
    deviation = math.sqrt(num * share * (1 - share)) + 1
    first = max(math.floor(num * share - _DEVIATIONS_MAX * deviation), 0)
    last = min(math.ceil(num * share + _DEVIATIONS_MAX * deviation), num)
    low, high = None, None
    below = 0.0  # probability of fewer than `count` values below the quantile; negligible before `first`
    for count in range(first, last + 1):
        # The value of rank r is at most the quantile if r or more are below it.
        if below <= tail and count >= 1:
            low = count
        below += _binomial_chance(num, share, count)
        # The value of rank count + 1 is at least the quantile if at most `count` are below.
        if below >= 1 - tail and count < num:
            high = count + 1
            break
    return low, high


def _binomial_chance(num: int, share: float, count: int) -> float:
    ways = math.lgamma(num + 1) - math.lgamma(count + 1) - math.lgamma(num - count + 1)
    return math.exp(ways + count * math.log(share) + (num - count) * math.log1p(-share))


def contrast_bounds(arm: Ratio, control: Ratio, factor: float, alpha: float) -> Interval:
    """Bounds of the arm's mean less `factor` times the control's, valid at all times at once with probability 1 -
    alpha; each side alone fails with half of alpha.

    The clock of the confidence sequence is information, the inverse of the contrast's variance: further requests of
    known keys hardly advance it, so that the bounds stay apart however many there are. Unknown for the first few
    clusters, because the variance has to be known.
    """
    if min(arm.degrees, control.degrees) < DEGREES_MIN or not control.value:
        return _UNKNOWN
    variance, degrees = _contrast(arm, control, factor)
    contrast = arm.value - factor * control.value
    if not variance:
        return Interval(contrast, contrast)
    information = (factor * control.value) ** 2 / variance
    # Howard et al., 1810.08240, section 3.5: the mixture that is narrowest at _TUNED_FOR.
    inverse = 2 * math.log(1 / alpha)
    prior = _TUNED_FOR**-2 / (inverse + math.log1p(inverse))
    spread = 1 + information / prior
    z = math.sqrt((1 + prior / information) * math.log(spread / (alpha * alpha)))
    half = student_of_normal(z, degrees) * math.sqrt(variance)
    return Interval(contrast - half, contrast + half)


def imbalance_evidence(num: int, num_all: int, share: float) -> float:
    """Log evidence that key groups with a loss fall to the arm more, or less, often than its share of all keys.

    If the arms are alike, each group is a coin toss with probability `share`; the alternative is a uniform mixture of
    all other coins. By chance it ever reaches log(1/alpha) with a probability of at most alpha.
    """
    num_others = num_all - num
    mixture = math.lgamma(num + 1) + math.lgamma(num_others + 1) - math.lgamma(num_all + 2)
    return mixture - num * math.log(share) - num_others * math.log1p(-share)

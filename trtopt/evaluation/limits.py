"""Limits for the distance of results from the reference's: one judgement of every kind of output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.core.options import typed
from trtopt.core.values import MIN_AGREEMENT, Kind
from trtopt.evaluation.measures import NEAR_ZERO, decibels, digits_below, measure, share

MIN_SNR = 20.0
"""dB, an error of a tenth of the signal; for outputs that agreement doesn't judge."""
MIN_COSINE = 0.99
"""The least cosine of every embedding: 20 dB over all are 0.995 in the mean and hide one that is far off. 0.99 is 8°: a search
by cosine confuses neighbours that are closer than that anyway."""
MIN_OVERLAP = 0.5
"""The least overlap of masks outside the commonest class: where objects are few, 99 % of the pixels agree without any."""


def _no_share(value: str | float) -> UsageError:
    return UsageError(f"`min_agreement=` is {value}; a share from 0 to 1 is needed, such as 0.95 or '95%'")


def share_of(text: str) -> float:
    """Return the number in a text such as "0.99" or "99%"; NaN where it isn't one."""
    text = text.strip()
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return math.nan


def not_finite(accuracy: Mapping[str, Any]) -> list[str]:
    """Return what no limit allows in `Agreement.figures()`: values that are NaN or infinite, where the reference's aren't."""
    return [
        f"of {name}, {count} value{'s are' if count > 1 else ' is'} NaN or infinite, where the reference's are finite"
        for name, output in accuracy["outputs"].items()
        if (count := output["nonfinite"])
    ]


def without_share(kinds: Iterable[Kind]) -> str:
    """Warn where a share is asked for, and outputs are of such kinds that none has one; "" where one has."""
    if any(kind.shared for kind in kinds):
        return ""
    return (
        f"`min_agreement=` has nothing to judge, as no output is {' or '.join(kind for kind in Kind if kind.shared)}; "
        f"`min_snr=` ({MIN_SNR:g} dB unless given) does; `output_kind=` says what an output is"
    )


@dataclass(frozen=True)
class Limits:
    """The distance that results may have from the reference's: by default, or where `min_agreement` alone is given, shares of
    that, 20 dB for embeddings, boxes and others (where they are next to zero the difference decides), and `MIN_COSINE`.

    Attributes:
        min_agreement: share that is the same, of each output whose kind has one (`Kind.shared`); a mask's overlap must be
            `MIN_OVERLAP`, or this where it is less.
        min_snr: dB, for every floating output, of boxes for each channel that has signal; without a cosine then.
    """

    min_agreement: float = MIN_AGREEMENT
    min_snr: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_agreement <= 1:
            raise _no_share(self.min_agreement)
        if self.min_snr is not None and not math.isfinite(self.min_snr):
            raise UsageError(f"`min_snr=` is {self.min_snr}; a number of dB is needed, such as 20")

    @classmethod
    @typed
    def of(cls, min_agreement: str | float | None, min_snr: float | None) -> Limits | None:
        """Return those that are given (a share also as "99%"), with the other one's default; None: none is."""
        if min_agreement is None:
            return None if min_snr is None else cls(min_snr=min_snr)
        part = share_of(str(min_agreement))
        if not 0 <= part <= 1:
            raise _no_share(min_agreement)
        return cls(part, min_snr)

    def missed(self, accuracy: Mapping[str, Any]) -> list[str]:
        """Return what of `Agreement.figures()` is outside, each with the value and the limit."""
        problems = not_finite(accuracy)
        for name, output in accuracy["outputs"].items():
            problems += [f"{name}: {problem}" for problem in self._of(output, accuracy["samples"])]
        return problems

    def kept(self, accuracy: Mapping[str, Any]) -> str:
        """Say what is asked of these outputs."""
        outputs = accuracy["outputs"].values()
        shared = dict.fromkeys(kind.shared for item in outputs if (kind := Kind(item["kind"])).shared)
        texts = [f"{share(self.min_agreement)} of the {' and '.join(shared)} the same"] if shared else []
        if self.min_snr is not None:
            texts += [f"{self.min_snr:g} dB"] * any(not item["integers"] for item in outputs)
        elif not all(Kind(item["kind"]).shared for item in outputs):
            cosine = f", a cosine of {MIN_COSINE:g}" * any(item["cosine_min"] is not None for item in outputs)
            texts.append(f"{MIN_SNR:g} dB{cosine}")
        return "at least " + ", ".join(texts) if texts else "nothing is NaN or infinite"

    def _of(self, output: Mapping[str, Any], samples: int) -> Iterator[str]:
        agreement, overlap, nearest = (output[name] for name in ("agreement", "overlap", "cosine_min"))
        if agreement is not None and agreement < self.min_agreement:
            asked = 100 * self.min_agreement
            exact = f"{asked:g}%" if round(asked, 1) != round(asked, 6) else f"{asked:.1f}%"
            yield f"{measure(output, samples, self.min_agreement)}, at least {exact} is asked for"
        least = min(MIN_OVERLAP, self.min_agreement)
        if overlap is not None and overlap < least:
            digits = digits_below(overlap, least, 2)
            yield f"overlap {overlap:.{digits}f} outside the commonest class, at least {least:.2g} is asked for"
        least_snr = MIN_SNR if self.min_snr is None and not Kind(output["kind"]).shared else self.min_snr
        if least_snr is None or output["integers"]:
            return
        silent = output["near_zero"] == output["rows"]
        if silent and (self.min_snr is None or float(output["snr_db"]) == -math.inf):  # nothing to be relative to
            if (worst := float(output["max_abs"])) >= NEAR_ZERO:
                yield f"the reference is next to zero, the difference up to {worst:.3g}"
            return
        lowest = (output["channels"] or {}).get("lowest")
        snr = float(output["snr_db"] if lowest is None else output["channels"]["snr_db"][lowest])
        if snr < least_snr:
            where = "" if lowest is None else f" in channel {lowest}"
            more = "; the reference is next to zero: give samples where it isn't, or only `min_agreement=`" * silent
            yield f"{decibels(snr, least_snr)}{where}, at least {least_snr:g} is asked for{more}"
        if nearest is not None and self.min_snr is None and float(nearest) < MIN_COSINE:
            digits = digits_below(float(nearest), MIN_COSINE, 4)
            yield f"cosine {float(nearest):.{digits}f} at the lowest, at least {MIN_COSINE:g} is asked for"

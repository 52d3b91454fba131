"""What a look at the data comes to: facts that a table keeps, what is refused, and what the user is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trtopt.calibration.quality import Sample, Survey, near_copies, outliers, random_tokens
from trtopt.calibration.table import Table
from trtopt.calibration.thresholds import BLIND, CLIPPING, quantization_error
from trtopt.core.errors import DataError
from trtopt.ort.ranges import FP16_NORMAL

NAMED = 5  # samples that a fact names
MOVES = 0.02  # mean expected change of thresholds from which more samples are worth asking for
# Share of tensors whose expected error is more than twice as large with the entropy threshold as unclipped
# (docs/results/calibration-rules.md).
COSTLY = 0.05
Facts = Mapping[str, Any]

INSIST = "insist with `allow_unusual_data=True`"


def facts(survey: Survey) -> dict[str, Any]:
    """Plain JSON of what a survey found; the same for any order of the samples."""
    samples = sorted(survey.samples, key=lambda item: (item.digest, item.name))
    digests = Counter(item.digest for item in samples)
    far, alike = outliers(samples), near_copies(samples)
    return {
        "samples": len(samples),
        "different": len(digests),
        "random": _named([item for item in samples if item.random]),
        "tokens": _named(random_tokens(samples)),
        "plain": _named([item for item in samples if item.plain])
        | {"seen": next((item.plain for item in samples if item.plain), "")},
        "copies": len(samples) - len(digests),
        "alike": {"count": len(alike), "some": [[one.name, other.name] for one, other in alike[:NAMED]]},
        "outliers": {
            "count": len(far),
            "some": [{"name": item.name, "seen": text} for item, text in far[:NAMED]],
        },
    }


def refuse(quality: Facts, allowed: bool, insist: str = INSIST) -> None:
    """Raise DataError for data that no scale should come from, unless the user insists.

    Args:
        insist: how the user would.

    Raises:
        DataError: more than half of the samples are white noise, random tokens or of one colour, or all are the same.
    """
    if allowed or not quality:
        return
    samples = int(quality["samples"])
    random, plain, tokens = quality["random"], quality["plain"], quality.get("tokens") or {"count": 0}
    least = "at least " if quality.get("early") else ""
    reasons = {
        "plain": f"{least}{plain['count']} of the {samples} images are of one colour throughout ({_list(plain)}: "
        f"{plain['seen']}): there is nothing to measure in them; give real images",
        "same": f"all {samples} samples are the same one: scales would fit that sample alone; give different real inputs",
        "random": f"{least}{random['count']} of the {samples} samples are random noise ({_list(random)}): neighbouring pixels "
        "have nothing to do with each other, as in no photo or scan, and scales from noise cost accuracy; give real images",
        "tokens": f"the token numbers of {tokens['count']} of the {samples} samples are random: hardly any comes twice, as in "
        "no text, and scales from random tokens cost accuracy; give the tokens of real texts",
    }
    same = samples if samples > 1 and quality["different"] == 1 else 0
    counts = {"plain": plain["count"], "same": same, "random": random["count"], "tokens": tokens["count"]}
    for name, reason in reasons.items():
        if 2 * counts[name] > samples:
            raise DataError(f"{reason}; if this is what the network will see, {insist}")


def refuse_early(survey: Survey, samples: int, allowed: bool) -> None:
    """`refuse` while the pass runs, as soon as what is still to come of all `samples` can't change it."""
    odd = sum(item.random for item in survey.samples), sum(bool(item.plain) for item in survey.samples)
    if not allowed and 2 * max(odd) > samples:
        refuse(facts(survey) | {"samples": samples, "early": True}, allowed)


def warnings(table: Table) -> tuple[str, ...]:
    """What the user should know of the data that a table was made from, by the facts that it keeps."""
    quality = table.quality
    if not quality:
        return ()
    texts = []
    if (random := quality["random"])["count"]:
        texts.append(f"random noise is among the samples ({random['count']}: {_list(random)}): leave it out")
    if (tokens := quality.get("tokens") or {"count": 0})["count"]:
        texts.append(f"the token numbers of {tokens['count']} samples are random: leave them out")
    if (plain := quality["plain"])["count"]:
        texts.append(f"images of one colour are among the samples ({plain['count']}: {_list(plain)}): they add nothing")
    if quality["copies"] and not table.data.get("repeated"):
        texts.append(
            f"{quality['copies']} of the {quality['samples']} samples are copies of others: they add nothing new"
        )
    alike = quality["alike"]
    if alike["some"]:
        one, other = alike["some"][0]
        texts.append(
            f"some images look almost the same as others ({alike['count']}, such as {one} and {other}): they add little"
        )
    if (far := quality["outliers"])["count"]:
        some = "; ".join(f"{item['name']}: {item['seen']}" for item in far["some"][:3])
        texts.append(
            f"some samples lie far outside the others ({far['count']}: {some}{'; …' if far['count'] > 3 else ''}): thresholds "
            "stretch to hold them; are they meant to be there?"
        )
    texts.append(_monotonous(table, quality))
    texts.append((quality.get("preprocessing") or {}).get("warning", ""))
    texts.append(quality.get("mixing", ""))
    texts.append(_moving(table, quality))
    texts.append(costly_entropy(table))
    return tuple(filter(None, texts))


def _monotonous(table: Table, quality: Facts) -> str:
    """Clipping methods trust that what is rare is noise; in data that is nearly always the same it may be the subject."""
    dull = quality["copies"] + quality["alike"]["count"] + quality["plain"]["count"]
    clipped = sorted({entry.method for entry in table.tensors.values()} & CLIPPING)
    if 2 * dull <= quality["samples"] or not clipped:
        return ""
    return (
        f"most of the {quality['samples']} samples show nearly the same ({dull} of them repeat others or are of one colour), "
        f"and {' and '.join(clipped)} may cut off what is rare in them: give more varied data, or use `method='minmax'`"
    )


def forecast(table: Table) -> str:
    """How far more samples would move thresholds, in a sentence; empty where that isn't known."""
    moves = (table.quality or {}).get("convergence")
    if not moves or moves["method"] != table.method:
        return ""
    return (
        f"another {moves['more']} samples like these would move thresholds by about {moves['mean']:.1%} on average "
        f"({moves['most']:.0%} for {moves['tensor']!r})"
    )


def _moving(table: Table, quality: Facts) -> str:
    text = forecast(table)
    too_few = text and quality["convergence"]["mean"] > MOVES
    return f"{text}: {quality['samples']} are too few, give more" if too_few else ""


def costly_entropy(table: Table) -> str:
    """A warning where the table's thresholds clip more than they gain, as entropy's may; empty where they don't."""
    if table.method not in BLIND:
        return ""
    worse = []
    for name, entry in table.tensors.items():
        if entry.histogram is not None and entry.histogram.absmax > 0:
            clipped, whole = quantization_error(entry.histogram, np.array([entry.amax, entry.histogram.absmax]))
            worse += [name] if clipped > 2 * whole else []
    if len(worse) < max(1.0, COSTLY * len(table.tensors)):
        return ""
    return (
        f"on this model the {table.method} search costs accuracy: for {len(worse)} of {len(table.tensors)} tensors (such as "
        f"{worse[0]!r}) its expected error is more than twice that of not clipping at all; use `method='auto'`, which takes "
        "the better per tensor"
    )


def fading(table: Table) -> str:
    """A warning where tensors hold nothing that FP16 can hold with all its digits, zeros aside; empty where none does.

    INT8 by itself stands that, since scales are FP32: what a build leaves in FP16 between its quantized layers doesn't.
    """
    largest = {
        name: entry.amax if entry.histogram is None else entry.histogram.absmax for name, entry in table.tensors.items()
    }
    small = {name: value for name, value in largest.items() if 0 < value < FP16_NORMAL}
    if not small:
        return ""
    least = min(small, key=lambda name: small[name])
    return (
        f"{len(small)} of {len(table.tensors)} tensors hold only values below {FP16_NORMAL:.2g}, FP16's smallest normal number "
        f"(the largest of {least!r} is {small[least]:.2g}), and FP16 loses them: with weights that aren't trained that is "
        "usual, so export the trained ones; else build with `bf16=True` beside `int8=True` (not on TensorRT 8.6)"
    )


def _named(samples: Sequence[Sample]) -> dict[str, Any]:
    return {"count": len(samples), "some": [item.name for item in samples[:NAMED]]}


def _list(group: Facts) -> str:
    return ", ".join(group["some"][:3]) + (", …" if group["count"] > 3 else "")

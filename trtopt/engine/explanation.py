"""Why a store has no engine with a key: in which parts the nearest one differs, in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_LABELS = {
    "model": "the model's content",
    "generation.family": "the TensorRT generation",
    "generation.version": "the TensorRT version",
    "gpu": "the GPU",
    "scales": "the scales",
    "native": "the calibration data",
    "cache": "the calibration cache",
    "trtopt": "trtopt's version",
    "samples": "the samples",
    "limit": "`min_snr=`",
    "graph": "`save_onnx=`",
    "targets": "`target=`",
    "spec.precision": "the precision",
    "spec.remainder": "the rest's precision",
    "spec.fp8_layers": "whether layers may be in FP8",
    "spec.io_fp32": "`fp32_io=`",
    "spec.overrides": "`precision_override=`",
    "spec.profiles": "`shapes=`",
    "preprocess": "the preprocessing",
}


def explained(store: str, parts: Mapping[str, Any], others: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """In which of `parts` the nearest engine of a store differs.

    Args:
        store: what messages call it.
        others: names and parts of its engines, the first of which counts where several are as near.
    """
    mine, nearest = _flat(parts), None
    for name, their_parts in others:
        other = _flat(their_parts)
        differing = sorted(part for part in mine.keys() | other.keys() if mine.get(part) != other.get(part))
        rank = ("model" in differing, len(differing))
        if differing and (nearest is None or rank < nearest[0]):
            nearest = rank, differing, other, name
    if nearest is None:
        return f"{store} has no engine yet"
    (other_model, _), differing, other, name = nearest
    if other_model:
        return f"{store} has no engine of this model"
    differences = [text for part in differing for text in _told(_label(part), other.get(part), mine.get(part))]
    more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
    return f"not in {store}: its nearest engine ({name[:12]}) differs in {', '.join(differences[:5])}{more}"


def _flat(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts by name; of the specification each option is one. Compute capabilities by the names that users type."""
    flat: dict[str, Any] = {}
    for name, value in parts.items():
        if name == "spec" and isinstance(value, Mapping):
            flat |= {f"spec.{option}": item for option, item in value.items()}
        elif name == "generation" and isinstance(value, Sequence) and len(value) == 2:
            flat |= {"generation.family": value[0], "generation.version": value[1]}
        elif name == "targets" and isinstance(value, Sequence):
            flat[name] = ",".join(f"sm{capability}" for capability in value)
        else:
            flat[name] = value
    return flat


def _label(part: str) -> str:
    return _LABELS.get(part, f"`{part.removeprefix('spec.')}=`" if part.startswith("spec.") else part)


def _told(label: str, there: Any, now: Any) -> Iterator[str]:
    """What differs, and how; of two mappings with the same keys, these."""
    both = isinstance(there, Mapping) and isinstance(now, Mapping)
    if both and there.keys() == now.keys():
        for key in there:
            if there[key] != now[key]:
                yield from _told(f"{label}: {key}", there[key], now[key])
    elif both:
        yield label
    else:
        yield f"{label} ({_shown(there)} there, {_shown(now)} now)"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "some"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return (
        f"{text[:12]}…" if isinstance(value, str) and len(value) == 64 else text if len(text) <= 60 else f"{text[:57]}…"
    )

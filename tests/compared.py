"""Outputs that are there already, compared as `verify` compares those of two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from trtopt.data.rebatch import Arrays
from trtopt.evaluation.agreement import Agreement, verify_all
from trtopt.graph.output_kinds import Kind


def _kind(array: NDArray[Any]) -> Kind:
    return Kind.TOKENS if array.dtype.kind in "iub" else Kind.CLASSES if array.ndim == 2 else Kind.OTHER


def compare(
    reference: Arrays,
    candidate: Arrays,
    labels: Sequence[int] | None = None,
    *,
    kinds: Mapping[str, Kind] | None = None,
) -> Agreement:
    """Output name → array, the first axis counting samples."""
    kinds = {name: _kind(array) for name, array in reference.items()} if kinds is None else kinds
    runs = {"candidate": lambda _: candidate}
    return verify_all(lambda _: reference, runs, [reference], labels, kinds=kinds)["candidate"]

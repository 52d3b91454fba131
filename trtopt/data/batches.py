"""Batches of real samples, which calibration, verification and benchmarks read, the same ones on every pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from trtopt.core.documents import Name
from trtopt.data.preprocess import Preprocess


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    name: Name
    reason: Name


class Batches(Protocol):
    """Samples in batches; iterating again gives the same ones."""

    @property
    def samples(self) -> int:
        """The number of samples in all."""

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Files left out."""

    @property
    def preprocess(self) -> Preprocess | None:
        """The way from an image to an input; None for arrays."""

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each sample, in order: a file, or "FILE[INDEX]"."""

    def describe(self) -> dict[str, Any]:
        """Plain JSON: kind, count, and a digest of the content that doesn't depend on order or file names."""

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Input name → array, first axis = samples."""

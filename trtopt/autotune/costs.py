"""The cost of leaving layers out of INT8: in the time that they take on a GPU where that was measured, else in arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LEAST = 1e-4  # that a layer is taken to cost when layers are ranked: nothing stays out for nothing
EQUAL = 0.01  # times that differ by less count as equal


@dataclass(frozen=True)
class Measured:
    """Times of two engines of one model on a GPU, as shares of the floating one's; means over the profiles.

    Attributes:
        quantized, floating: node → the share that it takes in either engine.
        described: what was measured, in words.
    """

    quantized: Mapping[str, float]
    floating: Mapping[str, float]
    described: str


@dataclass(frozen=True)
class Costs:
    """The costs of leaving layers out.

    Attributes:
        work: node → multiply-accumulates.
    """

    work: Mapping[str, int]
    measured: Measured | None = None

    @property
    def unit(self) -> str:
        return "the share of the arithmetic" if self.measured is None else self.measured.described

    def share(self, names: Iterable[str]) -> float:
        """Return the share of the arithmetic that these do."""
        return sum(self.work.get(name, 0) for name in names) / (sum(self.work.values()) or 1)

    def __call__(self, name: str) -> float:
        """Return what leaving a layer out costs; below 0: it is faster in floating point."""
        if self.measured is None:
            return self.share([name])
        return self.measured.floating.get(name, 0.0) - self.measured.quantized.get(name, 0.0)

"""Batches of real samples, which calibration, verification and benchmarks read, the same ones on every pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from trtopt.core.documents import Name
from trtopt.core.files import sha256_json
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import Arrays, rebatched

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, and why."""

    name: Name
    reason: Name


class Batches:
    """Samples in batches, input name → array, first axis = samples; iterating again gives the same ones.

    Attributes:
        samples: their number in all; batch: at a time.
        digests, names: of each sample, in order: of its content; a file, or "FILE[INDEX]".
        skipped: files left out.
        preprocess: the way from an image to an input; None for arrays.
    """

    kind: ClassVar[str]
    batch: int
    skipped: tuple[Skipped, ...] = ()
    preprocess: Preprocess | None = None

    def _choose(self, chosen: Sequence[tuple[str, str, Any]]) -> None:
        """Take these samples, in order: each one's digest, name, and place."""
        self._chosen, self.samples = chosen, len(chosen)
        self.digests, self.names = (tuple(item[field] for item in chosen) for field in (0, 1))

    def part(self, start: int, stop: int) -> Self:
        """The samples from `start` to `stop` alone; nothing is read for it, and of files it can be sent to another process."""
        some = copy.copy(self)
        some._choose(self._chosen[start:stop])
        return some

    @property
    def preparation(self) -> dict[str, Any] | None:
        """`preprocess` in plain JSON."""
        return None if self.preprocess is None else self.preprocess.describe()

    def describe(self) -> dict[str, Any]:
        """Plain JSON: kind, count, and a digest of the content that doesn't depend on order or file names."""
        return {"kind": self.kind, "count": self.samples, "digest": sha256_json(sorted(self.digests))}

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        return rebatched(self._pieces(), self.batch)

    def _pieces(self) -> Iterator[Arrays]:
        """Yield the samples, in order, at most a batch at a time."""
        raise NotImplementedError

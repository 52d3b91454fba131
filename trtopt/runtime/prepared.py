"""A call with arrays in host memory as one stretch, prepared once: copies in, a launch, the wait, copies out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from trtopt.cuda.arrays import start
from trtopt.runtime.baton import Row, Stretch, copying
from trtopt.runtime.machinecode import WIDTH

_TO, _SOURCE = 1, 2  # words of a copy's row


@dataclass(slots=True)
class Prepared:
    """All but where the caller's arrays lie.

    Attributes:
        sources: for each input that is copied, the word of `stretch` where its address goes.
        targets: for each output the same.
    """

    stretch: Stretch
    sources: tuple[int, ...]
    targets: tuple[int, ...]


def prepare(staging: Iterable[NDArray[Any]], work: Sequence[Row], landing: Sequence[NDArray[Any]]) -> Prepared:
    """`staging` and `landing`: the pinned memory of inputs that are copied, and of outputs; `work`: what is done in between."""
    into = [copying(start(array), 0, array.nbytes, stream=True) for array in staging]
    back = [copying(0, start(array), array.nbytes) for array in landing]
    first = len(into) + len(work)
    return Prepared(
        Stretch([*into, *work, *back]),
        tuple(WIDTH * row + _SOURCE for row in range(len(into))),
        tuple(WIDTH * row + _TO for row in range(first, first + len(back))),
    )

"""The best classes of scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import EngineError


@dataclass(frozen=True)
class Prediction:
    """One of the best classes of one image. `name` is None where the manifest has no names."""

    index: int
    score: float
    name: str | None

    def __str__(self) -> str:
        return f"{self.name or f'class {self.index}'} {self.score:.1%}"


def best(scores: NDArray[Any], top: int, classes: Sequence[str] | None, engine: str) -> list[Prediction]:
    """Rank the scores of one sample, as `Session.best`.

    Args:
        classes: names; not used where there are more or fewer of them than scores.
        engine: what gave them, for the message.
    """
    scores = np.asarray(scores, np.float64)
    if not (scores < np.inf).all():
        odd = int((~(scores < np.inf)).sum())
        raise EngineError(
            f"{engine} gives {odd} of {scores.size} scores as NaN or infinity: its arithmetic overflows, or the "
            "input isn't finite; build it with `bf16=True`, or with `precision_override=`"
        )
    exponentials = np.exp(scores - scores.max())
    are_shares = bool((scores >= 0).all() and abs(scores.sum() - 1) < 1e-3)  # the model ends in a softmax
    shares = scores if are_shares else exponentials / exponentials.sum()
    names = classes if classes and len(classes) == len(scores) else None
    order = np.argsort(-scores, kind="stable")[:top]
    return [Prediction(int(i), float(shares[i]), names[i] if names else None) for i in order]

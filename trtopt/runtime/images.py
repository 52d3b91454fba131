"""An engine's images: how they become its input, and the best classes of its scores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.errors import EngineError, UsageError
from trtopt.core.values import Kind
from trtopt.data.decoding import pixels
from trtopt.data.preprocess import Preprocess
from trtopt.data.rebatch import laid_out
from trtopt.runtime.open_engine import OpenEngine


@dataclass(frozen=True)
class Prediction:
    """One of the best classes of one image. `name` is None where the manifest has no names."""

    index: int
    score: float
    name: str | None

    def __str__(self) -> str:
        return f"{self.name or f'class {self.index}'} {self.score:.1%}"


def samples_of(engine: OpenEngine, images: Any, top: int) -> list[NDArray[Any]]:
    """Return images as samples of the engine's input; UsageError where the engine takes none, or these are no list of them."""
    prepare = preparation(engine)
    if not isinstance(top, (int, np.integer)) or top < 1:
        raise UsageError(f"top is {top!r}; a number of at least 1 is needed")
    samples = [prepare(pixels(image, index)) for index, image in enumerate(listed(images))]
    if not samples:
        raise UsageError("there are no images to run")
    return samples


def listed(images: Any) -> Iterable[Any]:
    """Return single images, of several or of one; UsageError for what is neither."""
    if isinstance(images, (str, os.PathLike, bytes, bytearray)) or getattr(images, "ndim", 4) != 4:
        return [images]
    if not isinstance(images, Iterable):
        raise UsageError(f"images is {type(images).__name__}; a list of images, or one, is needed")
    return images


def ranked(
    engine: OpenEngine, outputs: dict[str, NDArray[Any]], count: int, top: int
) -> list[list[Prediction]] | dict[str, Any]:
    """Return the best classes of so many images, where the only output scores classes; else the outputs."""
    [(name, scores), *others] = outputs.items()
    if others or len(scores) != count or not scores_classes(engine, name, scores):
        return outputs
    return [best(engine, row, int(top)) for row in scores]


def preparation(engine: OpenEngine) -> Preprocess:
    """Return how an image becomes the engine's input; UsageError where that isn't known, or it has several."""
    inputs, manifest = engine.inputs, engine.manifest
    if engine.preprocess is None or len(inputs) != 1:
        why, instead = f"it has {len(inputs)} inputs ({', '.join(info.name for info in inputs)})", ""
        if len(inputs) == 1:
            why = "its manifest has no preprocessing" if manifest else "no manifest says how they are prepared"
            instead = "build it with `preprocess=`, or "
        raise UsageError(
            f"{engine.engine.name} can't take images: {why}; {instead}give arrays (trtopt run … --data F.npz, Session.run)"
        )
    return engine.preprocess.at_opt(inputs, engine.profiles).fitted(inputs[0])


def stacked(engine: OpenEngine, samples: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return what `preparation` made of images, as the input."""
    [tensor] = engine._signature.inputs
    return laid_out({tensor.name: np.stack(samples).astype(tensor.dtype, copy=False)}, engine.inputs)


def scores_classes(engine: OpenEngine, name: str, output: NDArray[Any]) -> bool:
    """Return True for scores, samples × classes: as `kinds` or the manifest says; else every floating output may be."""
    kind = ({**((engine.manifest and engine.manifest.output_kinds) or {}), **engine.kinds}).get(name)
    return output.ndim == 2 and output.dtype.kind not in "iub" and kind in (None, Kind.CLASSES)


def best(engine: OpenEngine, scores: NDArray[Any], top: int = 5) -> list[Prediction]:
    """Return the best classes of one sample's scores, as shares of 1 (softmax, unless the model ends in one); EngineError
    where a score is NaN or plus infinity, so that none is the best."""
    scores = np.asarray(scores, np.float64)
    if not (scores < np.inf).all():
        odd = int((~(scores < np.inf)).sum())
        raise EngineError(
            f"{engine.engine.name} gives {odd} of {scores.size} scores as NaN or infinity: its arithmetic overflows, or the "
            "input isn't finite; build it with `bf16=True`, or with `precision_override=`"
        )
    exponentials = np.exp(scores - scores.max())
    are_shares = bool((scores >= 0).all() and abs(scores.sum() - 1) < 1e-3)  # the model ends in a softmax
    shares = scores if are_shares else exponentials / exponentials.sum()
    names = engine.classes if engine.classes and len(engine.classes) == len(scores) else None
    order = np.argsort(-scores, kind="stable")[:top]
    return [Prediction(int(i), float(shares[i]), names[i] if names else None) for i in order]

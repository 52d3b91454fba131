"""Preprocessing that an engine does itself: it takes pixels, and its graph makes the model's own input of them.

Resizing stays outside, and so does the making of gray; scale, mean, std, order of channels and layout are inside. What is known
of both sides is here: `builder` writes it into the graph, the manifest keeps it, and whoever holds an engine against its model
turns one's samples into the other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.core.documents import Described
from trtopt.core.errors import DataError, UsageError
from trtopt.core.values import Profile, ShapeRange, TensorInfo
from trtopt.data.preprocess import PRESETS, Preprocess
from trtopt.data.rebatch import Arrays

Floats = NDArray[np.float64]
_WHOLE = 0.01  # how far from a whole number a pixel may be found, of grey levels


@dataclass(frozen=True)
class Embedded(Described):
    """An embedded preprocessing."""

    input: str  # takes pixels: uint8, samples × height × width × channels, RGB or gray
    preprocess: Preprocess  # how an image becomes the model's own input, as if nothing were embedded

    @classmethod
    def of(cls, preprocess: Preprocess | None, inputs: Sequence[TensorInfo]) -> Embedded:
        """Embed it in a model with these inputs, of which one takes an image."""
        if preprocess is None:
            raise UsageError(
                "`embed_preprocess=True` needs to know how pixels become the model's input: give `preprocess=`, one of "
                f"{', '.join(PRESETS)} or a TOML file, or `scale=`, `mean=` and `std=`"
            )
        fitting, reasons = list[Embedded](), list[str]()
        for info in inputs:
            try:
                typed = preprocess.typed(info)
            except UsageError as error:
                reasons.append(str(error))
                continue
            if typed.dtype == "uint8":
                reasons.append(f"the input {info.name} takes uint8 already")
            else:
                fitting.append(cls(info.name, typed))
        if len(fitting) == 1:
            return fitting[0]
        why = f"finds no image input: {'; '.join(reasons) or 'there is none'}"
        if fitting:
            names = ", ".join(item.input for item in fitting)
            why = f"is for models with one image, and this one takes several ({names}): leave it out"
        raise UsageError(f"`embed_preprocess=True` {why}")

    @classmethod
    def load(cls, described: Mapping[str, Any]) -> Embedded:
        """Load what `describe` gave. Raises UsageError for a preprocessing that can't be right."""
        return cls(str(described["input"]), Preprocess.load(described["preprocess"]))

    @property
    def outside(self) -> Preprocess:
        """The preprocessing that is left to do before the engine."""
        channels = "gray" if self.preprocess.channels == "gray" else "rgb"
        return replace(
            self.preprocess, channels=channels, scale=1.0, mean=(0.0,), std=(1.0,), layout="nhwc", dtype="uint8"
        )

    def leaving(self, preprocess: Preprocess) -> Preprocess:
        """Return what is left to do of `preprocess` before the engine."""
        if other := self.preprocess.unlike(preprocess, resized=False):
            raise UsageError(
                f"the engine does its preprocessing itself ({self}), and `preprocess=` says another {other}: drop it, or build "
                "with `embed_preprocess=True` and this preprocessing"
            )
        return Embedded(self.input, preprocess).outside

    @property
    def order(self) -> tuple[int, ...]:
        """Axes of the pixels in the order of the model's layout."""
        return (0, 1, 2, 3) if self.preprocess.layout == "nhwc" else (0, 3, 1, 2)

    def inputs(self, inputs: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
        """The engine's inputs, of the model's."""
        return tuple(
            replace(info, dtype="uint8", shape=(*self._moved(info.shape)[:3], self.preprocess.count))
            if info.name == self.input
            else info
            for info in inputs
        )

    def profiles(self, profiles: Iterable[Profile]) -> tuple[Profile, ...]:
        """The engine's profiles, of the model's."""
        return tuple(
            {
                name: ShapeRange(*map(self._moved, (item.min, item.opt, item.max))) if name == self.input else item
                for name, item in profile.items()
            }
            for profile in profiles
        )

    def _moved(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """A shape of the model's input as one of pixels."""
        return tuple(shape[self.order.index(axis)] for axis in range(4))

    def from_pixels(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """The model's inputs, of the engine's."""
        return {**arrays, self.input: self.preprocess.of_pixels(arrays[self.input])}

    def to_pixels(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """The engine's inputs, of the model's; pixels stay what they are, gray that isn't whole is rounded, as it is outside.
        DataError for what wasn't made of pixels as the engine does it."""
        values = np.asarray(arrays[self.input])
        if values.dtype == np.uint8:
            return dict(arrays)
        ordered = values if self.preprocess.layout == "nhwc" else np.moveaxis(values, -3, -1)
        with np.errstate(over="ignore", invalid="ignore"):
            levels = ordered.astype(np.float64) / self.preprocess.factor - self.preprocess.offset
            pixels = np.rint(levels)
            away = float(np.abs(levels - np.clip(pixels, 0, 255)).max(initial=0))
            rounding = float(np.spacing(np.abs(values).max(initial=0)) / np.abs(self.preprocess.factor).min())
        tolerance = max(0.5 if self.preprocess.channels == "gray" else 0.0, rounding) + _WHOLE
        if not away <= tolerance:
            raise DataError(
                f"the samples of {self.input!r} aren't 8-bit pixels prepared as the engine does it itself, {self} (one is "
                f"{away:.3g} grey levels away from any): prepare them like that, from whole pixels"
            )
        if self.preprocess.channels == "bgr":
            pixels = pixels[..., ::-1]
        return {**arrays, self.input: np.ascontiguousarray(pixels.astype(np.uint8))}

    def __str__(self) -> str:
        def numbers(values: Floats) -> str:
            each = [f"{value:.6g}" for value in values]
            return each[0] if len({*each}) == 1 else f"({', '.join(each)})"

        what = f"(pixel - {numbers(0.0 - self.preprocess.offset)}) x {numbers(self.preprocess.factor)}"
        return f"{what}, {self.preprocess.channels.upper()}, {str(self.preprocess.layout).upper()}"

    @property
    def sentence(self) -> str:
        """A sentence for people."""
        return f"{self.input} takes pixels (0 to 255), of which the engine makes {self}"

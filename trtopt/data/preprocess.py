"""One description of how an image becomes a network's input, for calibration, checking, serving and the manifest alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.errors import UsageError, require
from trtopt.files import sha256_json
from trtopt.spec import TensorInfo

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESIZES = ("stretch", "crop", "letterbox")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "area", "lanczos")
CHANNELS = ("rgb", "bgr", "gray")
LAYOUTS = ("nchw", "nhwc")
DTYPES = ("float32", "float16", "uint8")


@dataclass(frozen=True)
class Preprocess:
    """Resize, then `(pixel × scale − mean) / std` per channel, then layout and dtype.

    Attributes:
        size: (height, width) of the input; None: the model's own.
        resize: "stretch" to the size; "crop": cut out the centre `crop` × the shorter side, in the size's proportions, and
            resize that; "letterbox": fit inside and fill the rest with `pad`.
        crop: share of the shorter side that the crop keeps, such as 224/256.
        interpolation: of the resize; shrinking bilinear and bicubic is antialiased as torchvision and Pillow do it.
        channels: order of the input's channels, or "gray".
        scale: factor on pixels (0 to 255), such as 1/255.
        mean, std: one number, or one per channel, after the scale.
        layout: "nchw" or "nhwc".  dtype: of the input.  pad: grey value of the letterbox, 0 to 255.

    >>> Preprocess.load("imagenet").describe()["crop"]
    0.875
    """

    size: tuple[int, int] | None = None
    resize: str = "stretch"
    crop: float = 1.0
    interpolation: str = "bilinear"
    channels: str = "rgb"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: str = "nchw"
    dtype: str = "float32"
    pad: int = 114

    def __post_init__(self) -> None:
        for name, allowed in (
            ("resize", RESIZES),
            ("interpolation", INTERPOLATIONS),
            ("channels", CHANNELS),
            ("layout", LAYOUTS),
            ("dtype", DTYPES),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"preprocessing: {name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if not 0 < self.crop <= 1:
            raise UsageError(f"preprocessing: crop is {self.crop}; a share above 0 and up to 1 is needed")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise UsageError(f"preprocessing: size is {list(self.size)}; [height, width] is needed")
        count = 1 if self.channels == "gray" else 3
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, count):
                raise UsageError(
                    f"preprocessing: {name} has {len(getattr(self, name))} values; 1 or {count} are needed"
                )
        if 0.0 in self.std:
            raise UsageError("preprocessing: std holds 0, which would divide by zero")
        if not 0 <= self.pad <= 255:
            raise UsageError(f"preprocessing: pad is {self.pad}; 0 to 255 is needed")

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Preprocess) -> Preprocess:
        """A preset by name, a TOML file, a mapping of the attributes, or one already made.

        A file or mapping may start from a preset: `preset = "imagenet"`.

        Raises:
            UsageError: no such preset or file, an unknown key, or a value that isn't allowed.
        """
        if isinstance(source, Preprocess):
            return source
        if isinstance(source, Mapping):
            return cls._from(dict(source), "preprocessing")
        name = os.fspath(source)
        if name in PRESETS:
            return PRESETS[name]
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"--preprocess {name!r} is neither a preset ({', '.join(PRESETS)}) nor a TOML file")
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"--preprocess {name}: not TOML: {error}") from None
        return cls._from(content, name)

    @classmethod
    def _from(cls, content: dict[str, Any], where: str) -> Preprocess:
        preset = content.pop("preset", None)
        if preset is not None and preset not in PRESETS:
            raise UsageError(f"{where}: preset {preset!r} isn't known; there are {', '.join(PRESETS)}")
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(content) - set(known))
        if unknown:
            raise UsageError(f"{where}: unknown key {', '.join(unknown)}; known: preset, {', '.join(known)}")
        base = PRESETS[preset] if preset else cls()
        try:
            for name in ("mean", "std"):
                if name in content:
                    given = content[name]
                    content[name] = tuple(map(float, given if isinstance(given, Sequence) else [given]))
            if content.get("size") is not None:
                given = content["size"]
                content["size"] = (int(given), int(given)) if isinstance(given, int) else tuple(map(int, given))
            for name in ("scale", "crop"):
                if name in content:
                    content[name] = float(content[name])
            return replace(base, **content)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{where}: {error}") from None

    def describe(self) -> dict[str, Any]:
        """Plain JSON; `Preprocess.load` reads it back."""
        plain = asdict(self)
        plain["mean"], plain["std"] = list(self.mean), list(self.std)
        plain["size"] = list(self.size) if self.size else None
        return plain

    @property
    def digest(self) -> str:
        return sha256_json(self.describe())

    def fitted(self, info: TensorInfo) -> Preprocess:
        """This preprocessing with its size taken from a network input, checked against it.

        Raises:
            UsageError: the input isn't an image in this layout, or its size or channels contradict; both are named.
        """
        if len(info.shape) != 4:
            shape = "x".join(map(str, info.shape)) or "scalar"
            raise UsageError(
                f"the input {info.name} has shape {shape}; images need four dimensions: give --data instead"
            )
        axes = (1, 2, 3) if self.layout == "nchw" else (3, 1, 2)
        channels, height, width = (info.shape[axis] for axis in axes)
        mine = 1 if self.channels == "gray" else 3
        if isinstance(channels, int) and channels > 0 and channels != mine:
            raise UsageError(
                f"the input {info.name} has {channels} channels in {self.layout.upper()}, the preprocessing gives {mine} "
                f"({self.channels}): set channels or layout in the preprocessing"
            )
        fixed = [size if isinstance(size, int) and size > 0 else None for size in (height, width)]
        if self.size is None:
            if None in fixed:
                raise UsageError(
                    f"the input {info.name} leaves its size open ({height}x{width}): set size = [height, width] in a "
                    "--preprocess file"
                )
            return replace(self, size=(int(fixed[0] or 0), int(fixed[1] or 0)))
        if any(model not in (None, own) for model, own in zip(fixed, self.size)):
            raise UsageError(
                f"the preprocessing makes {self.size[0]}x{self.size[1]} images, the input {info.name} takes {height}x{width}"
            )
        return self

    def __call__(self, image: NDArray[np.uint8]) -> NDArray[Any]:
        """One image to one sample.

        Args:
            image: uint8, height × width × 3, RGB.

        Returns:
            The sample without its batch axis: channels × height × width ("nchw") or height × width × channels.
        """
        if self.size is None:
            raise UsageError("this preprocessing has no size: use fitted(input) or set size")
        pixels = self._resized(image)
        if self.channels == "bgr":
            pixels = pixels[:, :, ::-1]
        elif self.channels == "gray":
            # ITU-R BT.601 luma, as OpenCV and Pillow convert.
            pixels = (pixels.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32))[:, :, None]
        if self.dtype == "uint8":
            result = np.rint(pixels).astype(np.uint8) if pixels.dtype != np.uint8 else pixels
        else:
            values = pixels.astype(np.float32)
            if self.scale != 1.0:
                values = values * np.float32(self.scale)
            values = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
            result = values.astype(self.dtype)
        return np.ascontiguousarray(result.transpose(2, 0, 1) if self.layout == "nchw" else result)

    def _resized(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        assert self.size is not None
        height, width = self.size
        if self.resize == "crop":
            image = _centre(image, self.crop, height / width)
        if self.resize != "letterbox":
            return _resize(image, height, width, self.interpolation)
        ratio = min(height / image.shape[0], width / image.shape[1])
        inner = max(1, round(image.shape[0] * ratio)), max(1, round(image.shape[1] * ratio))
        filled = np.full((height, width, 3), self.pad, np.uint8)
        top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
        filled[top : top + inner[0], left : left + inner[1]] = _resize(image, *inner, self.interpolation)
        return filled


def _centre(image: NDArray[np.uint8], share: float, proportion: float) -> NDArray[np.uint8]:
    """The largest centred rectangle of height / width = `proportion`, shrunk to `share`."""
    height, width = image.shape[:2]
    wide = min(width, height / proportion) * share
    h, w = max(1, round(wide * proportion)), max(1, round(wide))
    h, w = min(h, height), min(w, width)
    top, left = (height - h) // 2, (width - w) // 2
    return image[top : top + h, left : left + w]


def _resize(image: NDArray[np.uint8], height: int, width: int, interpolation: str) -> NDArray[np.uint8]:
    if image.shape[:2] == (height, width):
        return image
    cv2 = require("cv2", "ort", "resizing images")
    smaller = height < image.shape[0] and width < image.shape[1]
    if smaller and interpolation in ("bilinear", "bicubic"):
        # OpenCV's own bilinear and bicubic skip pixels when they shrink; torchvision and Pillow average over them.
        interpolation = "area"
    kinds = {
        "nearest": cv2.INTER_NEAREST,
        "bilinear": cv2.INTER_LINEAR,
        "bicubic": cv2.INTER_CUBIC,
        "area": cv2.INTER_AREA,
        "lanczos": cv2.INTER_LANCZOS4,
    }
    resized = cv2.resize(np.ascontiguousarray(image), (width, height), interpolation=kinds[interpolation])
    return np.asarray(resized, np.uint8)


PRESETS: dict[str, Preprocess] = {
    "imagenet": Preprocess(
        resize="crop",
        crop=224 / 256,
        scale=1 / 255,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    "efficientnet-lite": Preprocess(
        resize="crop", crop=224 / (224 + 32), interpolation="bicubic", mean=(127.0,), std=(128.0,)
    ),
    "yolo": Preprocess(resize="letterbox", scale=1 / 255, pad=114),
}

"""One description of how an image becomes a network's input, for calibration, checking, serving and the manifest alike."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, get_type_hints

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from trtopt.core.documents import Damaged, Described, Positive, converted, read_toml
from trtopt.core.errors import UsageError, require
from trtopt.core.values import Profile, TensorInfo, choice, x

DTYPES = ("float32", "float16", "uint8")
LARGEST = 1 << 26  # pixels of an input
CHOICES: dict[str, tuple[str, ...]] = {
    "resize": ("stretch", "crop", "letterbox"),
    "interpolation": ("nearest", "bilinear", "bicubic", "area", "lanczos"),
    "channels": ("rgb", "bgr", "gray"),
    "layout": ("nchw", "nhwc"),
    "dtype": DTYPES,
}
PAGE = "docs/preprocessing.md"  # every key with its values
_ANTIALIASED = ("bilinear", "bicubic", "lanczos")  # by Pillow, where `antialias` is set
_OPENCV = {"bilinear": "linear", "bicubic": "cubic", "lanczos": "lanczos4"}  # its own names


@dataclass(frozen=True)
class Preprocess(Described):
    """Resize, then `(pixel × scale − mean) / std` per channel, then layout and dtype.

    Attributes:
        size: (height, width) of the input; None: the model's own.
        resize: "stretch" to the size; "crop": the centre, `crop` × the shorter side, in the size's proportions; "letterbox":
            fit inside and fill the rest with `pad`.
        crop: share of the shorter side that the crop keeps: "resize to 256, crop 224" is 224/256.
        interpolation: "nearest", "bilinear", "bicubic", "area" or "lanczos".
        antialias: shrinking bilinear, bicubic and lanczos average over all pixels, as torchvision and Pillow do; without, they
            read only the nearest ones, as OpenCV and TensorFlow do.
        channels: order of the input's channels, or "gray".
        scale: factor on pixels (0 to 255), such as 1/255 (as text too: "1/255").
        mean, std: one number, or one per channel, after the scale.
        layout: "nchw" or "nhwc"; None: the input's own, nhwc where it ends with 1, 3 or 4 channels.
        dtype: "float32", "float16" or "uint8" (raw pixels: no scale, mean or std); None: the model's own.
        pad: grey value of the letterbox, 0 to 255.

    >>> Preprocess.load("imagenet").describe()["crop"]
    0.875
    """

    size: tuple[Positive, Positive] | None = None
    resize: str = "stretch"
    crop: Annotated[float, Meta(gt=0, le=1)] = 1.0
    interpolation: str = "bilinear"
    antialias: bool = True
    channels: str = "rgb"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: str | None = None
    dtype: str | None = None
    pad: Annotated[int, Meta(ge=0, le=255)] = 114

    def __post_init__(self) -> None:
        try:
            for name, kind in get_type_hints(Preprocess, include_extras=True).items():
                object.__setattr__(self, name, converted(_spelled_out(name, getattr(self, name)), kind, name))
        except Damaged as error:
            raise UsageError(f"preprocessing: {error}") from None
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) is not None:
                choice(value, choices, f"preprocessing: {name}")
        if self.size is not None and self.size[0] * self.size[1] > LARGEST:
            raise UsageError(f"preprocessing: size is {list(self.size)}; at most {LARGEST} pixels are taken")
        for name in ("mean", "std"):
            if (count := len(getattr(self, name))) not in (1, self.count):
                raise UsageError(f"preprocessing: {name} has {count} values; 1 or {self.count} are needed")
        if not all(map(math.isfinite, (self.scale, *self.mean, *self.std))):
            raise UsageError("preprocessing: scale, mean and std must be finite numbers")
        if self.scale == 0 or 0.0 in self.std:
            raise UsageError("preprocessing: scale or std is 0: every image would become the same")
        if self.dtype == "uint8" and ((self.scale, set(self.mean), set(self.std)) != (1.0, {0.0}, {1.0})):
            raise UsageError(
                'preprocessing: dtype is uint8, raw pixels, but scale, mean or std is set: drop them or set dtype = "float32"'
            )

    @classmethod
    def load(
        cls, source: str | os.PathLike[str] | Mapping[str, Any] | Preprocess, base: Preprocess | None = None
    ) -> Preprocess:
        """A preset by name, a TOML file, a mapping of the attributes, as `describe` gives it, or one already made.

        A file or mapping may start from a preset: `preset = "imagenet"`; a mapping from a file too.

        Args:
            base: what a mapping without `preset` starts from; None: the attributes' defaults.

        Raises:
            UsageError: no such preset or file, an unknown key, or a value that isn't allowed.
        """
        if isinstance(source, Preprocess):
            return source
        if isinstance(source, (str, os.PathLike)) and os.fspath(source) in PRESETS:
            return PRESETS[os.fspath(source)]
        presets, where = ", ".join(PRESETS), ""
        if isinstance(source, Mapping):
            content = dict(source)
        elif not isinstance(source, (str, os.PathLike)):
            raise UsageError(
                f"preprocess is {type(source).__name__}; a preset ({presets}), a TOML file or a mapping is needed"
            )
        elif not os.path.isfile(source):  # noqa: PTH113  (Path's raises errors for names that are too long)
            raise UsageError(f"`preprocess=` {os.fspath(source)!r} is neither a preset ({presets}) nor a TOML file")
        else:
            base, where = None, f"{os.fspath(source)}: "
            try:
                content = read_toml(source)
            except Damaged as error:
                raise UsageError(f"`preprocess='{os.fspath(source)}'`: {error}") from None
        if (preset := content.pop("preset", None)) is not None:
            if where and preset not in tuple(PRESETS):
                raise UsageError(f"{where}preset {preset!r} isn't known; there are {', '.join(PRESETS)}")
            base = cls.load(preset)
        keys = ["preset", *(item.name for item in fields(cls))]
        for key in sorted(map(str, set(content) - set(keys))):
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(keys)}"
            raise UsageError(f"{where}unknown key {key}; {hint} {PAGE} describes every key")
        try:
            return replace(base or cls(), **content)
        except UsageError as error:
            raise UsageError(f"{where}{error}") from None

    def unlike(self, other: Preprocess, *, resized: bool = True) -> str:
        """Names of what `other` says otherwise, such as "resize and channels"; empty: nothing. Sizes and types don't count, and
        how an image comes to its size only if it is `resized`."""
        names = [
            name for name in ("channels", "layout") if len({getattr(self, name), getattr(other, name)} - {None}) > 1
        ]
        if not names and not (np.allclose(self.offset, other.offset) and np.allclose(self.factor, other.factor)):
            names = ["scale, mean or std"]
        if resized and self.resize != other.resize:
            names.append("resize")
        elif resized and self.resize == "crop" and not math.isclose(self.crop, other.crop, rel_tol=1e-3):
            names.append("crop")
        return " and ".join(names)

    @property
    def offset(self) -> NDArray[np.float64]:
        """The number added to the pixels of each channel of the input, before they are multiplied with `factor`."""
        return np.broadcast_to(-np.array(self.mean, np.float64) / self.scale, self.count)

    @property
    def factor(self) -> NDArray[np.float64]:
        return np.broadcast_to(self.scale / np.array(self.std, np.float64), self.count)

    @property
    def count(self) -> int:
        """The number of channels of the input."""
        return 1 if self.channels == "gray" else 3

    def _axes(self, info: TensorInfo) -> tuple[int, int, int]:
        """Return the axes of an input's channels, height and width."""
        last = info.channels_last if self.layout is None else self.layout == "nhwc"
        return (3, 1, 2) if last else (1, 2, 3)

    def at_opt(self, inputs: Sequence[TensorInfo], profiles: Sequence[Profile]) -> Preprocess:
        """This preprocessing with the opt size of the first profile, where neither it nor the image input has a size."""
        image = _image(inputs)
        shape = profiles[0].get(image.name) if image is not None and profiles else None
        if self.size is not None or image is None or shape is None or len(shape.opt) != 4:
            return self
        _, height, width = self._axes(image)
        is_open = height in image.open_axes or width in image.open_axes
        return replace(self, size=(shape.opt[height], shape.opt[width])) if is_open else self

    def known(self, inputs: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
        """The inputs; where there is but an image, with the size of this preprocessing in place of an open one."""
        image = _image(inputs)
        if self.size is None or image is None:
            return tuple(inputs)
        sizes = {axis: size for axis, size in zip(self._axes(image)[1:], self.size) if axis in image.open_axes}
        return (replace(image, shape=tuple(sizes.get(axis, size) for axis, size in enumerate(image.shape))),)

    def check_profiles(self, inputs: Sequence[TensorInfo], profiles: Sequence[Profile]) -> None:
        """Raise UsageError if the images of this preprocessing fit none of the profiles."""
        image = _image(inputs)
        if self.size is None or image is None:
            return
        name, sides = image.name, tuple(zip(self._axes(image)[1:], self.size))
        ranges = [profile[name] for profile in profiles if name in profile and len(profile[name].min) == 4]
        if ranges and not any(all(item.min[axis] <= size <= item.max[axis] for axis, size in sides) for item in ranges):
            shapes = "; ".join(f"{name}:{item}" for item in ranges)
            raise UsageError(
                f"images are prepared in {x(self.size)}, which `shapes='{shapes}'` leaves out: give another "
                "`size=`, or `shapes=` that hold it"
            )

    def typed(self, info: TensorInfo) -> Preprocess:
        """This preprocessing with the dtype of a network input, whose channels and layout it must have.

        Raises:
            UsageError: the input isn't an image in this layout; both are named.
        """
        if len(info.shape) != 4:
            raise UsageError(
                f"the input {info.name} has shape {info.dims}; images need four dimensions: give `data=` instead"
            )
        axes, mine = self._axes(info), self.count
        channels, layout = info.sizes[axes[0]], "nhwc" if axes[0] == 3 else "nchw"
        if channels not in (-1, mine):
            raise UsageError(
                f"the input {info.name} has {channels} channels in {layout.upper()}, the preprocessing gives {mine} "
                f"({self.channels}): give other `channels=` or `layout=`"
            )
        dtype = self.dtype or info.dtype
        if dtype != info.dtype or dtype not in DTYPES:
            raise UsageError(
                f"the input {info.name} takes {info.dtype}, the preprocessing gives {self.dtype or ' or '.join(DTYPES)}: "
                "set its dtype, or give `data=` instead"
            )
        return replace(self, dtype=dtype, layout=layout)

    def fitted(self, info: TensorInfo) -> Preprocess:
        """This preprocessing with its size taken from a network input, checked against it.

        Raises:
            UsageError: the input isn't an image in this layout, or its size or channels contradict; both are named.
        """
        typed = self.typed(info)
        _, height, width = (info.sizes[axis] for axis in self._axes(info))
        if self.size is None:
            if -1 in (height, width):
                raise UsageError(
                    f"the input {info.name} {info.dims} leaves its size open: give `size='HEIGHTxWIDTH'` such as 640x640, or "
                    "size = [height, width] in a `preprocess=` file"
                )
            return replace(typed, size=(height, width))
        if any(model not in (-1, own) for model, own in zip((height, width), self.size)):
            raise UsageError(
                f"the preprocessing makes images of {x(self.size)}, the input {info.name} takes {info.dims}"
            )
        return typed

    def __call__(self, image: NDArray[np.uint8]) -> NDArray[Any]:
        """One image to one sample.

        Args:
            image: uint8, height × width × 3, RGB.

        Returns:
            The sample without its batch axis: channels × height × width ("nchw") or height × width × channels.

        Raises:
            UsageError: the image is of another kind, or there is no size.
        """
        if self.size is None:
            raise UsageError("this preprocessing has no size: use fitted(input) or set size")
        check_image(image, "an image")
        pixels: NDArray[Any] = self._resized(image)
        if self.channels == "gray":
            # ITU-R BT.601 luma, as OpenCV and Pillow convert.
            pixels = (pixels.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32))[:, :, None]
        return self.of_pixels(pixels)

    def of_pixels(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Do what comes after the size: order of channels, scale, mean, std, dtype and layout.

        Args:
            pixels: height × width × channels (RGB, or gray), 0 to 255; any axes before these are kept.
        """
        if self.channels == "bgr":
            pixels = pixels[..., ::-1]
        if self.dtype == "uint8":
            result = np.rint(pixels).astype(np.uint8) if pixels.dtype != np.uint8 else pixels
        else:
            values: NDArray[Any] = pixels.astype(np.float32)
            if self.scale != 1.0:
                values = values * np.float32(self.scale)
            values = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
            result = values.astype(self.dtype or "float32")
        return np.ascontiguousarray(result if self.layout == "nhwc" else np.moveaxis(result, -1, -3))

    def _resized(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        assert self.size is not None
        height, width = self.size
        if self.resize == "letterbox":
            ratio = min(height / image.shape[0], width / image.shape[1])
            inner = max(1, round(image.shape[0] * ratio)), max(1, round(image.shape[1] * ratio))
            filled = np.full((height, width, 3), self.pad, np.uint8)
            top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
            filled[top : top + inner[0], left : left + inner[1]] = self._scaled(image, inner, None)
            return filled
        return self._scaled(image, (height, width), self.crop if self.resize == "crop" else None)

    def _scaled(self, image: NDArray[np.uint8], size: tuple[int, int], share: float | None) -> NDArray[np.uint8]:
        """`image`, or its centre if `share` is given, at `size` (height, width)."""
        if self.antialias and self.interpolation in _ANTIALIASED:
            pillow = require("PIL.Image", "ort", "antialiased resizing")
            box = None if share is None else _window(image.shape[:2], size, share)
            if box is None and image.shape[:2] == size:
                return image
            kind = getattr(pillow.Resampling, self.interpolation.upper())
            return np.asarray(pillow.fromarray(np.ascontiguousarray(image)).resize(size[::-1], kind, box), np.uint8)
        if share is not None:
            image = _centre(image, share, size[0] / size[1])
        if image.shape[:2] == size:
            return image
        cv2 = require("cv2", "ort", "resizing images")
        kind = getattr(cv2, f"INTER_{_OPENCV.get(self.interpolation, self.interpolation).upper()}")
        return np.asarray(cv2.resize(np.ascontiguousarray(image), size[::-1], interpolation=kind), np.uint8)


def _window(image: tuple[int, ...], size: tuple[int, int], share: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom, in pixels of the image, of what resizing and then cropping leaves.

    Rounded where torchvision's Resize and CenterCrop round, so that one resize of this window equals the two.
    """
    full = [math.floor(target / share + 1e-9) for target in size]
    short = 0 if full[0] / image[0] >= full[1] / image[1] else 1  # the axis that `share` is exact on
    full[1 - short] = max(size[1 - short], int(full[short] * image[1 - short] / image[short]))
    low = [round((whole - target) / 2) * pixels / whole for whole, target, pixels in zip(full, size, image)]
    high = [
        min(float(pixels), start + target * pixels / whole)
        for start, whole, target, pixels in zip(low, full, size, image)
    ]
    return low[1], low[0], high[1], high[0]


def _centre(image: NDArray[np.uint8], share: float, proportion: float) -> NDArray[np.uint8]:
    """The largest centred rectangle of height / width = `proportion`, shrunk to `share`, in whole pixels.

    Rounded as the EfficientNet reference does (`_decode_and_center_crop` of its preprocessing.py).
    """
    height, width = image.shape[:2]
    wide = min(width, height / proportion) * share
    h, w = (max(1, min(limit, math.floor(side + 1e-9))) for limit, side in ((height, wide * proportion), (width, wide)))
    top, left = (height - h + 1) // 2, (width - w + 1) // 2
    return image[top : top + h, left : left + w]


def check_image(image: NDArray[Any], what: str) -> None:
    """Raise UsageError unless an array is an image: uint8, height × width × 3."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise UsageError(f"{what} is {image.dtype} {image.shape}; uint8 height x width x 3 in RGB is needed")


def _image(inputs: Sequence[TensorInfo]) -> TensorInfo | None:
    """The input of a model that takes an image and nothing else."""
    return inputs[0] if len(inputs) == 1 and len(inputs[0].shape) == 4 else None


def _spelled_out(name: str, value: Any) -> Any:
    """A value with what may be left out: lists around single numbers, and fractions worked out; Damaged for no fraction."""
    many = isinstance(value, Sequence) and not isinstance(value, str)
    if many:  # NumPy's doubles are floats, and none to msgspec
        value = [float(item) if isinstance(item, float) else item for item in value]
    elif isinstance(value, float):
        value = float(value)
    if name in ("mean", "std", "size") and value is not None and not many:
        return [value] * (2 if name == "size" else 1)
    if name in CHOICES and isinstance(value, str):
        return value.lower()
    if name == "scale" and isinstance(value, str):
        whole, slash, part = value.partition("/")
        try:
            return float(whole) / (float(part) if slash else 1.0)
        except (ValueError, ZeroDivisionError):
            raise Damaged(f'scale is {value!r}; a number or a fraction such as "1/255" is needed') from None
    return value


PRESETS: dict[str, Preprocess] = {
    "imagenet": Preprocess(
        resize="crop", crop=224 / 256, scale=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),
    "efficientnet-lite": Preprocess(
        resize="crop", crop=224 / (224 + 32), interpolation="bicubic", antialias=False, mean=(127.0,), std=(128.0,)
    ),
    "yolo": Preprocess(resize="letterbox", antialias=False, scale=1 / 255, pad=114),
}

"""Sources of inputs: images or arrays, as batches of real samples. Random data is never made here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtopt.core.errors import UsageError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import TensorInfo
from trtopt.data.arrays import ArrayBatches, named_batches, only
from trtopt.data.images import ImageBatches
from trtopt.data.preprocess import PAGE, PRESETS, Preprocess
from trtopt.data.rebatch import Batches, Skipped, alone

__all__ = ["SAMPLES", "ArrayBatches", "Batches", "ImageBatches", "Preprocess", "Skipped", "named_batches", "open_data"]

SOURCE = ("images", "data", "preprocess", "limit")  # the arguments of `open_data` that requests have, too
SAMPLES = 64  # real ones that a float model or an engine is judged on, unless --limit says another number


def samples_of(request: Any) -> dict[str, Any]:
    """Return those arguments of `open_data` that requests have, too."""
    return {name: getattr(request, name) for name in SOURCE}


def open_data(
    inputs: Sequence[TensorInfo],
    *,
    images: Any = None,
    data: Any = None,
    preprocess: Any = None,
    limit: int | None = None,
    batch: int = 8,
    threads: int | None = None,
    reporter: Reporter = SILENT,
) -> Batches:
    """Batches for a model with these inputs, from images or from arrays.

    Args:
        inputs: the network's inputs.
        images: a folder (searched deep) or a list of image files, for a model with one image input.
        data: .npz (one array per input name, as the model takes it: samples along its `batch_axis`, and where that is None one
            sample, or samples along an axis before it), .npy, a folder of them, or in memory: an array or tensor, arrays by
            input name, or an iterable of these, such as a DataLoader or a data set; of tuples the first ones are the inputs, in
            order, and labels behind them aren't read.
        preprocess: preset, TOML file, mapping or `Preprocess`; needed with images.
        limit: use at most so many samples, chosen by content; of an iterator, which isn't read further, the first ones.
        batch: samples at a time.
        threads: for decoding images; None: up to four.

    Raises:
        UsageError: neither or both are given, they don't fit the model, or an input is no tensor of numbers.
        DataError: nothing usable in them.
    """
    if images is None and data is None:
        raise UsageError("no data: give `images=DIR` or `data='F.npz'`")
    if images is not None and data is not None:
        raise UsageError("both `images=` and `data=` are given: choose one")
    if odd := next((info for info in inputs if not info.numeric), None):
        raise UsageError(
            f"the input {odd.name} is of type {odd.dtype}, which samples can't be given for and TensorRT hasn't; convert it "
            "outside the network, or export the model with a tensor of numbers there"
        )
    if data is not None:
        if preprocess is not None:
            raise UsageError("`preprocess=` is for `images=`: arrays in `data=` are used as they are; drop one")
        return ArrayBatches(data, inputs, limit=limit, batch=batch, reporter=reporter)
    if alone(inputs):
        raise UsageError(
            "`images=` fits a model whose inputs count samples on their first axis, as images are put together there: give "
            f"`data='F.npz'` for {', '.join(f'{info.name} {info.dims}' for info in inputs)}"
        )
    image = only(inputs, "`images=`", "`data='F.npz'`")
    if preprocess is None:
        raise UsageError(
            f"`images=` needs `preprocess=`, how pixels become inputs: {', '.join(PRESETS)} or a TOML file ({PAGE}); or give "
            "`scale=`, `mean=` and `std=`"
        )
    return ImageBatches(images, image, Preprocess.load(preprocess), limit=limit, batch=batch, threads=threads)

"""Whether data is fit to calibrate on: looked at sample by sample as it passes, judged when all of it was seen.

Each sample leaves a record of about half a kilobyte, so memory doesn't grow with what a sample holds, and records of shards
join to what one pass would have given, in any order.

Random images are told by their pixels: in white noise a pixel says nothing about the one two pixels on. Random token numbers,
the usual filling for a language model's inputs, are told by how seldom a number comes again, the most frequent ones left out,
which may be padding and marks. Other inputs without a picture, such as measurements, may well look like noise when they are
real: they aren't judged. docs/results/calibration-rules.md has what the limits rest on.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtopt.data.rebatch import Arrays

Floats = NDArray[np.float32]

LAGS = (2, 3, 4, 6, 8, 12, 16)  # pixels
STRUCTURE = 0.1  # correlation at one of them that an image has and noise hasn't
SMALLEST = 24  # pixels: smaller pieces of a plain surface show nothing but the camera's noise
ALIKE = 0.995  # correlation of two images' 16 x 16 thumbnails that makes them near copies
FAR = 6.0  # robust standard deviations
PROBES = 16  # samples kept for the look into the model
RANGED = 4  # of them, those that all tensors' ranges are measured on; tensors that are counted are on all samples
PROBE_BYTES = 32 << 20
COMPARED = 4096  # samples whose thumbnails are compared
_THUMB = 16
THUMB_BYTES = 2 * _THUMB * _THUMB  # of a sample's `thumb`
TOKENS = 64  # numbers of a sequence that are looked at
VOCABULARY = 500  # a smaller range may be letters or bytes


@dataclass(frozen=True)
class Sample:
    """What is remembered of one sample.

    Attributes:
        name: its file, or its place in the data ("sample 3", from 0).
        digest: of its content.
        mean, std, absmax: over all its floating inputs.
        random: an image input is white noise.
        plain: what is seen where every image input is of one colour throughout; empty where not.
        thumb: the image's 16 x 16 means, centred and normalised, float16; empty where there is none.
        tokens: the first `TOKENS` numbers of the integer input that reaches highest, int64; empty where none is a sequence.
    """

    name: str
    digest: str
    mean: float
    std: float
    absmax: float
    random: bool
    plain: str
    thumb: bytes = field(default=b"", repr=False)
    tokens: bytes = field(default=b"", repr=False)


class Survey:
    """What passed. `watch` a pass, or the shards of one; then ask `report.facts`.

    Attributes:
        probes: some of the samples, with a first axis of 1, for a look into the model: the same ones in any order.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.probes: dict[str, dict[str, NDArray[Any]]] = {}
        # Of the sample with the largest magnitude: that, its digest, and its content.
        self._furthest: tuple[float, str, dict[str, NDArray[Any]]] | None = None

    def watch(self, batches: Iterable[Arrays], check: Callable[[], None] = lambda: None) -> Iterator[Arrays]:
        """The same batches, looked at as they are read; `check` is called after each and may raise."""
        number = 0
        for batch in batches:
            paths = getattr(batches, "paths", None)  # asked each time: images found unusable leave the list
            size = min((len(array) for array in batch.values() if np.ndim(array)), default=0)
            for index in range(size):
                name = str(paths[number]) if paths is not None else f"sample {number}"
                self.add(name, {key: np.asarray(array[index]) for key, array in batch.items()})
                number += 1
            check()
            yield batch

    def add(self, name: str, feed: Arrays) -> None:
        """Look at one sample: input name → array without the sample axis."""
        flats = [
            np.ascontiguousarray(array, np.float32).reshape(-1) for array in feed.values() if array.dtype.kind == "f"
        ]
        lows = [float(flat.min()) for flat in flats if flat.size]
        highs = [float(flat.max()) for flat in flats if flat.size]
        finite = all(map(math.isfinite, lows + highs))  # NaN shows in both
        low, high = min(lows, default=0.0), max(highs, default=0.0)
        mean, square = _moments(flats) if finite else (math.nan, math.nan)
        images_by_input = {
            key: image for key, array in feed.items() if finite and (image := as_image(array)) is not None
        }
        plain = [_plain(key, image) for key, image in images_by_input.items()]
        plain = plain if all(plain) else []
        images = [_near_one(image) for image in images_by_input.values()]
        greys = [image.mean(0) if len(image) > 1 else image[0] for image in images]
        # Cheap, over all the content: two samples of one digest are the same for all that depends on it here.
        digest = f"{checksum(feed):08x}{struct.pack('>dd', mean, square).hex()}"
        self.samples.append(
            Sample(
                name,
                digest,
                mean,
                math.sqrt(max(square - mean * mean, 0.0)),
                max(high, -low),
                not plain and any(map(is_noise, images, greys)),
                ", ".join(plain),
                _thumb(greys[0]) if greys else b"",
                _tokens(feed),
            )
        )
        if finite:
            self._keep(digest, max(high, -low), feed)

    @property
    def images(self) -> list[dict[str, NDArray[Any]]]:
        """The probes that hold images."""
        return [feed for feed in self.feeds if any(as_image(array[0]) is not None for array in feed.values())]

    @property
    def feeds(self) -> list[dict[str, NDArray[Any]]]:
        """The probes, in an order of their own."""
        return [feed for _, feed in sorted(self.probes.items())]

    @property
    def ranged(self) -> list[dict[str, NDArray[Any]]]:
        """What all tensors' ranges are measured on: the first probes, and the sample that goes furthest in an input."""
        chosen = dict(sorted(self.probes.items())[:RANGED])
        if self._furthest is not None:
            chosen.setdefault(self._furthest[1], self._furthest[2])
        return list(chosen.values())

    def _keep(self, digest: str, largest: float, feed: Arrays) -> None:
        """Keep the samples of the lowest digests, and that of the largest magnitude: the same ones in any order."""
        size = sum(array.nbytes for array in feed.values())
        most = max(2, min(PROBES, PROBE_BYTES // max(size, 1)))
        before = self._furthest
        if before is None or (largest, before[1]) > (before[0], digest):
            self._furthest = largest, digest, {name: np.array(array[None]) for name, array in feed.items()}
        if digest in self.probes or (len(self.probes) >= most and digest > max(self.probes)):
            return
        self.probes[digest] = {name: np.array(array[None]) for name, array in feed.items()}
        while len(self.probes) > most:
            del self.probes[max(self.probes)]


def _moments(flats: Sequence[Floats]) -> tuple[float, float]:
    """Mean of all values and of their squares. Summed in float64 by NumPy: BLAS's sums depend on its number of threads."""
    count = sum(flat.size for flat in flats) or 1
    total = sum(float(flat.sum(dtype=np.float64)) for flat in flats)
    squares = sum(float(np.square(flat, dtype=np.float64).sum()) for flat in flats)
    return total / count, squares / count


def _near_one(image: Floats) -> Floats:
    """The image scaled, exactly, so that squares and sums of its values are normal FP32 numbers; usual ones as they are."""
    exponent = math.frexp(float(np.abs(image).max()))[1]
    return image if abs(exponent) <= 32 else np.ldexp(image, -exponent)


def as_image(array: NDArray[Any]) -> Floats | None:
    """Channels x height x width where a sample looks like an image: rank 3 with 1 or 3 channels, first or last."""
    if array.ndim != 3 or array.dtype.kind not in "fu":
        return None
    if array.shape[0] in (1, 3):
        image = array
    elif array.shape[2] in (1, 3):
        image = array.transpose(2, 0, 1)
    else:
        return None
    return np.asarray(image, np.float32) if min(image.shape[1:]) >= SMALLEST else None


def is_noise(image: Floats, grey: Floats | None = None) -> bool:
    """Whether an image (channels x height x width; `grey`: their mean) is white noise, perhaps resized or compressed."""
    grey = image.mean(0) if grey is None else grey
    rows, columns = max(1, grey.shape[0] // 64), max(1, grey.shape[1] // 64)
    if max(_correlation(grey[::rows], 2, 1), _correlation(grey[:, ::columns], 2, 0)) >= 0.25:
        return False  # all but a few real images end here, after a quarter of their rows and columns
    # Small images of noise correlate by chance: one in a thousand passes here, which no set of samples hangs on. A wider
    # limit would take patches of real lawn for noise.
    limit = max(STRUCTURE, 4 / math.sqrt(grey.size))
    lags = [lag for lag in LAGS if lag <= min(grey.shape) // 4]
    if max(_correlation(grey, lag, axis) for lag in lags for axis in (0, 1)) >= limit:
        return False
    coloured = len(image) > 1 and abs(_alike(image[0], image[-1])) < 0.3  # as no photo's channels are
    if max(_correlation(grey, 1, axis) for axis in (0, 1)) >= (0.6 if coloured else 0.4):
        return False
    centred = (grey - grey.mean()).astype(np.float64)
    variance = float((centred**2).mean())
    # Uniform 1.8, normal 3: dots on a plain ground, which are uncorrelated too, have far more.
    return variance > 0 and float((centred**4).mean()) < 4.5 * variance**2


def outliers(samples: Sequence[Sample]) -> list[tuple[Sample, str]]:
    """Samples whose spread or largest magnitude lies far above the others', or whose mean far from theirs; worst first.

    With each, what was seen. Distances are in standard deviations as the median absolute deviation estimates them (which
    outliers can't move), of log spread and log magnitude, and of the mean in units of the median spread; never finer than
    0.12, so that what is less than twice the usual is never far (means: 0.25; among few they lie close by
    chance). Small values aren't: they stretch no threshold.
    """
    usable = [item for item in samples if item.std > 0 and item.absmax > 0]
    if len(usable) < 8:
        return []
    spread = float(np.median([item.std for item in usable]))
    distances: dict[int, tuple[float, str]] = {}
    looks = (
        ("magnitudes up to", [item.absmax for item in usable], True),
        ("a spread of", [item.std for item in usable], True),
        ("a mean of", [item.mean for item in usable], False),
    )
    for what, values, logarithmic in looks:
        axis = np.log(values) if logarithmic else np.asarray(values) / spread
        middle = float(np.median(axis))
        unit = max(1.4826 * float(np.median(np.abs(axis - middle))), 0.12 if logarithmic else 0.25)
        distance = (axis - middle if logarithmic else np.abs(axis - middle)) / unit
        usual = float(np.median(values))
        for index in np.flatnonzero(distance > FAR):
            text = f"{what} {values[index]:.3g} where {usual:.3g} is usual"
            distances[int(index)] = max(distances.get(int(index), (0.0, "")), (float(distance[index]), text))
    ranked = sorted(distances.items(), key=lambda item: (-item[1][0], usable[item[0]].digest))
    return [(usable[index], text) for index, (_, text) in ranked]


def near_copies(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Images that look the same as another though their content differs, each with the one it resembles.

    Of more than `COMPARED` samples those of the lowest digests are compared.
    """
    different = {item.digest: item for item in samples if item.thumb}
    compared = [different[digest] for digest in sorted(different)[:COMPARED]]
    if len(compared) < 2:
        return []
    halves = np.frombuffer(b"".join(item.thumb for item in compared), np.float16)
    thumbs = halves.astype(np.float32).reshape(len(compared), -1)
    pairs = []
    for start in range(0, len(compared), 512):
        alike = thumbs[start : start + 512] @ thumbs.T
        for row in range(len(alike)):
            earlier = np.flatnonzero(alike[row, : start + row] > ALIKE)
            if earlier.size:
                pairs.append((compared[start + row], compared[int(earlier[0])]))
    return pairs


def random_tokens(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with token numbers, if these look drawn evenly from their range; else, or where too few tell, none."""
    texts = [item for item in samples if item.tokens]
    counts = Counter(np.frombuffer(b"".join(item.tokens for item in texts), np.int64).tolist())
    rest = dict(counts.most_common()[8:])
    total = sum(rest.values())
    span = max(rest, default=0) - min(rest, default=0) + 1
    expected = total * (total - 1) / 2 / span  # pairs of equal numbers, were all equally likely
    repeats = sum(count * (count - 1) / 2 for count in rest.values())
    return texts if span >= VOCABULARY and expected >= 10 and repeats < 2 * expected else []


def _tokens(feed: Arrays) -> bytes:
    # A text is one row a sample; numbers of several axes are categories or edges, which may well be spread evenly.
    sequences = [array for array in feed.values() if array.dtype.kind in "iu" and array.ndim == 1 and array.size >= 8]
    if not sequences:
        return b""
    tokens = max(sequences, key=lambda array: int(array.max()))[:TOKENS].astype("<i8")
    steps = np.diff(tokens)
    counting = bool((steps >= 0).all() or (steps <= 0).all())  # positions, times: even by nature
    return b"" if counting else tokens.tobytes()


def _plain(name: str, image: Floats) -> str:
    """What there is to see in an image of one colour; empty for others."""
    colours = image[:, 0, 0]
    if not bool((image == colours[:, None, None]).all()):
        return ""
    text = f"{colours[0]:g}" if bool((colours == colours[0]).all()) else ", ".join(f"{item:.3g}" for item in colours)
    return f"{name!r} is {text} everywhere"


def checksum(feed: Arrays) -> int:
    """CRC-32 of all the content, by name."""
    value = 0
    for name in sorted(feed):
        value = zlib.crc32(np.ascontiguousarray(feed[name]).reshape(-1).view(np.uint8).data, value)
    return value


def _thumb(grey: Floats) -> bytes:
    edges = [np.linspace(0, size, _THUMB + 1).astype(int)[:-1] for size in grey.shape]
    sums = np.add.reduceat(np.add.reduceat(grey, edges[0], 0), edges[1], 1)
    areas = np.outer(*(np.diff(np.append(edge, size)) for edge, size in zip(edges, grey.shape)))
    means = sums / areas
    means -= means.mean()
    length = float(np.linalg.norm(means))
    return (means / length).astype(np.float16).tobytes() if length > 1e-6 * float(np.abs(sums).max() + 1e-30) else b""


def _correlation(grey: Floats, lag: int, axis: int) -> float:
    """|correlation| of values `lag` apart along `axis`."""
    ahead, behind = (grey[lag:], grey[:-lag]) if axis == 0 else (grey[:, lag:], grey[:, :-lag])
    return abs(_alike(ahead, behind))


def _alike(one: Floats, other: Floats) -> float:
    """Pearson's correlation; 1 where one of them is constant."""
    first, second = one - one.mean(), other - other.mean()
    scale = math.sqrt(float(np.vdot(first, first)) * float(np.vdot(second, second)))
    return float(np.vdot(first, second)) / scale if scale > 0 else 1.0

"""What a worker does: opens models and data, decodes and observes shards, makes tables. All of it can travel by pickle."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtopt.calibration.calibrator import check_enough, data_notes, half_ranges
from trtopt.calibration.expected import check_preprocessing
from trtopt.calibration.observe import combined, observe, require_gpu_provider
from trtopt.calibration.prepared import Prepared, prepare
from trtopt.calibration.quality import PROBES, Sample, Survey, facts, refuse
from trtopt.core.errors import CalibrationError, OutputError, TrtoptError
from trtopt.core.files import made_folder, sha256_file, sha256_json
from trtopt.core.host import forget_peak, peak_memory
from trtopt.core.values import Override, TensorInfo
from trtopt.core.version import __version__
from trtopt.data import ArrayBatches, ImageBatches, open_data
from trtopt.data.rebatch import Arrays, alone, joined
from trtopt.graph.io import load_model, save_model
from trtopt.jobs.joblist import DataSet
from trtopt.jobs.state import State, packed_looks, packed_observation
from trtopt.ort.sessions import version as ort_version

Samples = ImageBatches | ArrayBatches
BATCH = 8  # samples read at a time; nothing depends on it


@dataclass(frozen=True)
class OpenModel(Prepared):
    """A model, folded and written where workers read it; `proto` is empty until it is `loaded`.

    Attributes:
        folder: holds `model.onnx` and its external data.
        nbytes: of all files there.
    """

    folder: Path
    nbytes: int
    inputs: tuple[TensorInfo, ...]

    def loaded(self) -> OpenModel:
        return replace(self, proto=_graph(self.folder))

    @property
    def fixed_batch(self) -> int:
        """Samples that the model takes at once; 1 where it takes any number."""
        if alone(self.inputs):
            return 1
        return max((info.shape[0] for info in self.inputs if info.shape and isinstance(info.shape[0], int)), default=1)


@dataclass(frozen=True)
class OpenData:
    """A data set, looked through: what it is, and its samples, which still lie in their files."""

    samples: Samples
    described: Mapping[str, Any]
    preprocess: Mapping[str, Any] | None
    skipped: tuple[Mapping[str, str], ...]

    def __len__(self) -> int:
        return self.samples.samples

    def name(self, number: int) -> str:
        """Of a sample, for people, as `calibrate` names it."""
        return str(self.samples.paths[number]) if isinstance(self.samples, ImageBatches) else f"sample {number}"

    def shard(self, start: int, stop: int) -> str:
        """The name of a shard: its samples' contents, in their order."""
        return sha256_json(self.samples.digests[start:stop])


@dataclass(frozen=True)
class Shard:
    """Some samples for `observe_shard`: in their files, decoded in a file, or decoded in memory.

    Attributes:
        first: number of its first sample in the data set.
    """

    source: Samples | Path | Arrays
    first: int
    count: int


@lru_cache(maxsize=1)
def _graph(folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / "model.onnx")


def open_model(path: Path, overrides: Sequence[str], folder: Path) -> OpenModel:
    """Load, check and fold a model, and write it to `folder`, which is made."""
    loaded = load_model(path, lazy=True)
    prepared = prepare(loaded, tuple(map(Override.parse, overrides)))
    try:
        folder.mkdir()
    except OSError as error:
        raise OutputError(f"can't write {folder}: {error.strerror}") from error
    save_model(prepared.proto, folder / "model.onnx")
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    bare = {**vars(prepared), "proto": onnx.ModelProto()}
    return OpenModel(**bare, folder=folder, nbytes=nbytes, inputs=loaded.inputs)


def open_samples(data: DataSet, inputs: Sequence[TensorInfo], threads: int, folder: Path) -> OpenData:
    """Look through a data set for a model with these inputs: which files can be used, and what is in them.

    Args:
        folder: where compressed arrays are unpacked to, so that shards map them; made if there are any.
    """
    batches = open_data(
        inputs,
        images=data.images,
        data=data.data,
        preprocess=data.preprocess,
        limit=data.limit,
        batch=BATCH,
        threads=threads,
        unpack=folder,
    )
    assert isinstance(batches, (ImageBatches, ArrayBatches))
    check_enough(batches)
    prepared = None if batches.preprocess is None else batches.preprocess.describe()
    return OpenData(batches, batches.describe(), prepared, tuple(asdict(item) for item in batches.skipped))


def decode_to_file(part: Samples, path: Path) -> Path:
    """Images as the network takes them, in one .npy file that many passes can map."""
    layout: Any = np.lib.format  # untyped in some of the NumPy versions that are supported
    try:
        with path.open("wb") as file:  # written, not mapped: on a full disk a mapped page ends the process
            for index, batch in enumerate(part):
                (values,) = batch.values()
                if not index:
                    header = {"descr": values.dtype.str, "fortran_order": False}
                    layout.write_array_header_1_0(file, header | {"shape": (part.samples, *values.shape[1:])})
                file.write(np.ascontiguousarray(values).data)
    except OSError as error:
        raise OutputError(f"can't keep decoded images in {path.parent}: {error.strerror or error}") from error
    return path


def decode(part: Samples) -> dict[str, NDArray[Any]]:
    """The samples in memory, by input."""
    return joined(part)


def observe_shard(
    model: OpenModel, shard: Shard, threads: int, device: str | None = None, graph: onnx.ModelProto | None = None
) -> dict[str, Any]:
    """The histograms of one shard as plain JSON, with what they cost and the versions that they depend on.

    Args:
        device: "cuda": on the GPU; None: on the CPU.
        graph: the model's, where its files aren't at hand.
    """
    forget_peak()
    started, survey = time.monotonic(), Survey()
    try:
        batches = survey.watch(_read(model, shard))
        proto = graph or _graph(model.folder)
        observation = observe(proto, model.tensors, batches, threads=threads, shard=True, device=device or "cpu")
    except CalibrationError as error:
        if not shard.first:
            raise
        raise CalibrationError(f"{error} (samples counted from number {shard.first} of the data set)") from None
    if observation.samples != shard.count:
        raise CalibrationError(
            f"{observation.samples} of the {shard.count} samples of a shard were there: the data changed"
        )
    return {
        **packed_observation(observation),
        "looks": packed_looks(survey.samples),
        "seconds": round(time.monotonic() - started, 3),
        "peak": peak_memory(),
        "versions": versions(require_gpu_provider() if device == "cuda" else None),
    }


def versions(engine: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of what the bits of a histogram may depend on; `engine`: of the GPU that runs models."""
    components = {"trtopt": __version__, "onnxruntime": ort_version("calibration")}
    return components | dict(engine or {})


def make_tables(
    state: Path,
    model: OpenModel,
    data: OpenData,
    pass_key: str,
    shards: Sequence[str],
    tables: Sequence[tuple[Path, str, Path]],
    unusual: bool,
) -> list[dict[str, Any] | TrtoptError]:
    """Merge the shards of a pass and write a table for each (model, method, output): a result or an error each.

    Args:
        unusual: data that `calibrate` would refuse, such as copies of one sample, is allowed.

    Raises:
        CalibrationError: a tensor is constant over all shards, or a shard's file is gone.
        DataError: most of the samples are of one colour, or all are the same.
    """
    folder, prepared = State(state), model.loaded()
    observations, survey, seconds = [], Survey(), 0.0
    for shard in shards:
        record = folder.shard(pass_key, shard)
        if record is None:
            raise CalibrationError(f"the shard {shard[:32]} in {state} can't be read any more: run the list again")
        observations.append(record[0])
        survey.samples += record[1]
        seconds += record[2]
    survey.samples = [replace(item, name=data.name(number)) for number, item in enumerate(survey.samples)]
    quality = facts(survey)
    refuse(quality, unusual, "insist with allow_unusual_data = true in the list's [data.NAME]")
    whole = combined(prepared.proto, observations)
    probes = _probes(model, data, survey.samples)
    quality["preprocessing"] = check_preprocessing(load_model(tables[0][0], lazy=True).proto, probes.images)
    ranges = half_ranges(prepared.proto, probes.ranged, whole.histograms)

    def written(path: Path, method: str, output: Path) -> dict[str, Any] | TrtoptError:
        try:
            table = replace(prepared, name=path.name).table(
                whole,
                method,
                quality,
                data=data.described,
                preprocess=data.preprocess,
                skipped=data.skipped,
                seconds=round(seconds, 3),
                ranges=ranges,
            )
            made_folder(output.parent, advice="")
            table.save(output)
        except TrtoptError as error:
            return error
        return {
            "digest": table.digest,
            "sha256": sha256_file(output),
            "samples": table.samples,
            "tensors": dict(Counter(entry.method for entry in table.tensors.values())),
            "notes": list(data_notes(table)),
        }

    return [written(*item) for item in tables]


def _probes(model: OpenModel, data: OpenData, samples: Sequence[Sample]) -> Survey:
    """The samples that a pass over all of them would have kept for a look into the model, read once more."""
    numbers = {item.digest: number for number, item in enumerate(samples)}
    survey = Survey()
    furthest = min(samples, key=lambda item: (-item.absmax, item.digest))
    for digest in dict.fromkeys([*sorted(numbers)[:PROBES], furthest.digest]):
        source = data.samples.part(numbers[digest], numbers[digest] + 1)
        for _ in survey.watch(_read(model, Shard(source, numbers[digest], 1))):
            pass
    return survey


def _read(model: OpenModel, shard: Shard) -> Iterator[Arrays]:
    """Batches under the model's own input names: decoded images are shared by models that name theirs otherwise."""
    names = [info.name for info in model.inputs]
    arrays = {names[0]: np.load(shard.source, mmap_mode="r")} if isinstance(shard.source, Path) else shard.source
    batches: Iterable[Arrays]
    if isinstance(arrays, Mapping):
        starts = range(0, shard.count, BATCH)
        batches = ({name: values[start : start + BATCH] for name, values in arrays.items()} for start in starts)
    else:
        batches = arrays
    for batch in batches:
        yield dict(zip(names, batch.values())) if len(names) == 1 else batch

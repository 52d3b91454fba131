"""The real samples that accuracy is judged on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from trtopt.builder.request import BuildRequest
from trtopt.calibration.scales import check_preparation
from trtopt.calibration.table import Table
from trtopt.calibration.text_cache import is_cache
from trtopt.core.shapes import SeenSizes, by_input, parse_profiles, seen_sizes
from trtopt.data import SAMPLES, Batches, open_data, samples_of
from trtopt.data.preprocess import Preprocess
from trtopt.graph.io import Model, load_model


def preparation(model: Model, request: BuildRequest) -> Preprocess | None:
    """Return how its images become inputs: as it says, else as its table does; in the opt size where that is open."""
    preprocess, calib, table = request.preprocess, request.calib, None
    if (preprocess is not None or request.images is not None) and calib is not None and not is_cache(calib):
        table = Table.load(calib)
        check_preparation(preprocess, table)
    if request.images is None:  # given without images it is passed on all the same, for `open_data` to refuse
        passed_on = preprocess is not None and calib is None and not request.embed_preprocess
        return Preprocess.load(preprocess) if passed_on else None
    if preprocess is None and table is not None:
        preprocess = table.preprocess
    profiles = by_input(parse_profiles(request.shapes), model.inputs)
    return None if preprocess is None else Preprocess.load(preprocess).at_opt(model.inputs, profiles)


def real_samples(model: Model, request: BuildRequest, default: int | None = SAMPLES) -> Batches:
    """The real samples of a request, at most `default` unless it says how many."""
    changes = {"preprocess": preparation(model, request), "limit": default if request.limit is None else request.limit}
    return open_data(model.inputs, **{**samples_of(request), **changes}, batch=request.batch)


def with_model(request: BuildRequest) -> BuildRequest:
    """Return the request with its model in place of the path, so that no engine of it reads or folds that again."""
    return replace(request, model=cast("Any", load_model(request.model)))


def sizes_of_samples(model: Model, request: BuildRequest) -> SeenSizes:
    """The sizes of a request's samples where the model leaves them open; none without samples."""
    if request.images is None and request.data is None:
        return {}
    return seen_sizes(model.inputs, real_samples(model, request))

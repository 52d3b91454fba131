"""A folded graph is held against the model itself, as it was given, once in a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from onnx import ModelProto

from trtopt.core.errors import MissingDependency, ModelError, TrtoptError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Profile
from trtopt.data.convert import single_runs
from trtopt.data.rebatch import Arrays
from trtopt.graph.guard import same
from trtopt.graph.inputs import network_inputs
from trtopt.graph.io import Model
from trtopt.graph.prepare import FoldedModel, give_up_folding, prepare, taken
from trtopt.ort.comparison import compare

SAMPLES = 2  # runs of the model as it is
_COMPARED: dict[tuple[str, str], str] = {}  # fingerprints of a model and of its folded graph → what comparing them gave


def proven(
    model: Model, *, samples: Iterable[Arrays] = (), profiles: Sequence[Profile] = (), reporter: Reporter = SILENT
) -> FoldedModel:
    """Return the folded form of a model, held against what is folded; that itself where the outputs of the two are apart. What
    was taken in otherwise than the model has it is held against the model, and a difference told.

    Args:
        samples: real ones, of which the first are run; else made-up inputs, of the profiles' sizes.
    """
    folded = prepare(model, reporter=reporter)
    if folded.report.problem:
        return folded
    key, given = (model.fingerprint, folded.fingerprint), taken(model)
    if key not in _COMPARED and same(given.proto, folded.proto):
        _COMPARED[key] = ""
    if key not in _COMPARED:
        try:
            feeds = first_feeds(model.proto, samples)
        except TrtoptError:  # said by the work that they are for
            return folded
        try:
            if given.changes and (
                far := compare(model.proto, given.proto, model.inputs, samples=feeds, profiles=profiles)
            ):
                what = f"have a {far}" if far.startswith("largest") else f"aren't known: {far}"
                reporter.warn(f"beside the model's own results those as TensorRT can run it {what}; verify measures it")
            _COMPARED[key] = compare(given.proto, folded.proto, model.inputs, samples=feeds, profiles=profiles)
        except (MissingDependency, ModelError) as error:
            reporter.note(f"the folded graph wasn't held against the model as it is: {error}")
            _COMPARED[key] = ""
    return give_up_folding(model, _COMPARED[key]) if _COMPARED[key] else folded


def first_feeds(proto: ModelProto, samples: Iterable[Arrays]) -> list[Arrays]:
    """The first samples, each as the model takes it."""
    return [run.feed for run in islice(single_runs(network_inputs(proto), samples), SAMPLES)]

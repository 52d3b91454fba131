"""A folded graph is held against the model itself, as it was given, once in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from onnx import ModelProto

from trtopt.core.errors import MissingDependency, ModelError, TrtoptError
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.values import Profile
from trtopt.data.convert import single_runs
from trtopt.data.rebatch import Arrays
from trtopt.graph.inputs import network_inputs
from trtopt.graph.io import Model
from trtopt.graph.passes.fold import FoldReport, fold
from trtopt.graph.proto import fingerprint
from trtopt.ort.comparison import compare

SAMPLES = 2  # runs of the model as it is
_COMPARED: dict[tuple[str, str], str] = {}  # fingerprints of a model and of its folded graph → what comparing them gave


def held_against(
    model: Model,
    *,
    samples: Iterable[Arrays] = (),
    profiles: Sequence[Profile] = (),
    reporter: Reporter = SILENT,
) -> Callable[[ModelProto, ModelProto], str]:
    """Make what `fold` asks whether its result can stand for the model: "", or how far the outputs of the two are apart.

    Args:
        samples: real ones, of which the first are run; else made-up inputs, of the profiles' sizes.
    """

    def compared(before: ModelProto, after: ModelProto) -> str:
        key = model.fingerprint, fingerprint(after)
        if key not in _COMPARED:
            try:
                feeds = first_feeds(before, samples)
            except TrtoptError:  # said by the work that they are for
                return ""
            try:
                _COMPARED[key] = compare(before, after, model.inputs, samples=feeds, profiles=profiles)
            except (MissingDependency, ModelError) as error:
                reporter.note(f"the folded graph wasn't held against the model as it is: {error}")
                _COMPARED[key] = ""
        return _COMPARED[key]

    return compared


def proven(
    model: Model,
    folding: tuple[ModelProto, FoldReport],
    compare: Callable[[ModelProto, ModelProto], str],
    reporter: Reporter = SILENT,
) -> tuple[ModelProto, FoldReport]:
    """Return what `fold` made of a model, or less of it where `compare` says that this can't stand for the model."""
    return fold(model.proto, reporter=reporter, compare=compare) if compare(model.proto, folding[0]) else folding


def first_feeds(proto: ModelProto, samples: Iterable[Arrays]) -> list[Arrays]:
    """The first samples, each as the model takes it."""
    return [run.feed for run in islice(single_runs(network_inputs(proto), samples), SAMPLES)]

"""The folded model that travels from stage to stage: made by the first that asks, and kept as long as the model is."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

from onnx import ModelProto

from trtopt.core.progress import SILENT, Reporter
from trtopt.graph.io import Model
from trtopt.graph.lengths import Place, max_input_lengths
from trtopt.graph.passes.fold import FoldReport, fold, unfolded
from trtopt.graph.passes.intake import Taken, take_in
from trtopt.graph.passes.quantize import is_quantized
from trtopt.graph.proto import fingerprint


@dataclass(frozen=True, eq=False)
class FoldedModel:
    """The graph that check, calibrate and build work on.

    Attributes:
        proto: the folded graph; treat it as read-only.
        report: the changes that folding made, and why it made no more.
    """

    proto: ModelProto = field(repr=False)
    report: FoldReport

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.proto)

    @cached_property
    def max_lengths(self) -> dict[Place, int]:
        """Input and axis → the largest size that the graph has constants for."""
        return max_input_lengths(self.proto)


_TAKEN: WeakKeyDictionary[Model, Taken] = WeakKeyDictionary()  # so that no weights outlive their model
_FOLDED: WeakKeyDictionary[Model, FoldedModel] = WeakKeyDictionary()


def taken(model: Model) -> Taken:
    """Return what is folded of a model: what somebody else has quantized as TensorRT has it."""
    if model not in _TAKEN:
        _TAKEN[model] = take_in(model.proto)
    return _TAKEN[model]


def without_scales(model: Model) -> bool:
    """Take a model without its scales, where TensorRT can't have them as they are; tell whether it holds them still."""
    if holds_scales(model) and not taken(model).exact:
        _TAKEN[model] = take_in(model.proto, drop=True)
        _FOLDED.pop(model, None)
    return holds_scales(model)


def holds_scales(model: Model) -> bool:
    """Return whether a model is quantized by scales of its own, as it is taken."""
    return is_quantized(taken(model).proto)


def prepare(model: Model, *, reporter: Reporter = SILENT) -> FoldedModel:
    """Return the folded form of a model, which is folded at the first call only. ModelError as `fold`."""
    folded = _FOLDED.get(model)
    if folded is None:
        folded = _FOLDED[model] = FoldedModel(*fold(taken(model).proto, reporter=reporter))
    return folded


def give_up_folding(model: Model, problem: str) -> FoldedModel:
    """Return the model as it is, for all stages from now on: its folded form can't stand for it."""
    folded = _FOLDED[model] = FoldedModel(*unfolded(taken(model).proto, problem))
    return folded

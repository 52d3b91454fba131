"""ONNX Runtime opens a model while it is being folded, in case folding finds nothing to do in it.

So it is with what was folded before, and with most of what PyTorch exports today. Folding is Python's work; opening a model
reads its weights, puts them in another order and writes them, which isn't: on two cores both take the time of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto

from trtopt.calibration.observe import Engine
from trtopt.core.values import Override
from trtopt.graph.inputs import network_inputs
from trtopt.graph.io import Model
from trtopt.graph.passes.fold import same_but_order, unfolded
from trtopt.graph.passes.placement import find_points, gates_of
from trtopt.graph.proto import model_size
from trtopt.graph.view import to_ir

LARGEST = 256 << 20  # bytes of a model: what is opened in vain takes twice as much memory


class OpenedAhead:
    """A session for the graph that folding gives where it finds nothing to do.

    Raises:
        Exception: whatever opening the model raises; it comes again, with its message, where the model is needed.
    """

    def __init__(self, model: Model, overrides: Sequence[Override] = (), *, gates: bool = False) -> None:
        self._proto = unfolded(model.proto)
        inputs, graph = network_inputs(self._proto), to_ir(self._proto)
        points = find_points(graph, overrides=overrides, gates=gates_of(graph) if gates else ())
        self._engine: Engine | None = Engine(self._proto, [name for name in points.activations if name not in inputs])

    def engine_for(self, proto: ModelProto, outputs: Sequence[str]) -> Engine:
        """The session, once, if it is one for this graph, whatever the order of nodes and outputs; else a new one."""
        engine, self._engine = self._engine, None
        if engine is not None and sorted(engine.outputs) == sorted(outputs) and same_but_order(self._proto, proto):
            return engine
        del engine
        return Engine(proto, outputs)


def worth_opening(model: Model) -> bool:
    """Whether a model is in a file, so that comparing it reads no weights, and isn't too large."""
    return model.path is not None and model_size(model.proto) <= LARGEST

"""Find what TensorRT refuses of a model before anything that takes long, by rules and its parser, and what to do instead."""

from __future__ import annotations

import contextlib

from onnx import ModelProto

from trtopt.core.errors import ModelError, UnsupportedOperator
from trtopt.core.progress import SILENT, Reporter
from trtopt.core.temporary import scratch
from trtopt.core.values import Issue
from trtopt.graph.io import Model, save_model
from trtopt.graph.limits import instead
from trtopt.graph.origin import Origins
from trtopt.graph.passes.expand import written_out
from trtopt.graph.passes.old_parser import readable_model
from trtopt.graph.prepare import taken
from trtopt.trt.generation import Generation
from trtopt.trt.parsing import refusal


def asked(
    generation: Generation, folded: ModelProto, reporter: Reporter = SILENT
) -> tuple[ModelProto, tuple[Issue, ...], tuple[tuple[str, int], ...]]:
    """The graph that a build would give the parser, what is refused of it, and the inputs whose values decide shapes, with
    their lengths. Operators that a build would write out are."""
    graph = folded
    with contextlib.suppress(ModelError):  # `opset_findings` says it
        graph = readable_model(graph, generation.capabilities.max_opset)
    with scratch() as folder:
        path = folder / "model.onnx"
        while True:
            save_model(graph, path)
            issues = generation.unsupported(path)
            parts = written_out(graph, issues, reporter) if issues else None
            if parts is None:
                return graph, issues, () if issues else generation.shape_inputs(path)
            graph = parts


def refuse(generation: Generation, model: Model, folded: ModelProto | None) -> None:
    """Raise UnsupportedOperator for what a build would end with, after calibrating on all samples.

    Args:
        folded: for the parser; None: it isn't asked.
    """
    name = str(model.path or "the model")
    if why := taken(model).refused:
        raise UnsupportedOperator(f"TensorRT can't take {name}: {why}")
    graph, issues, _ = asked(generation, folded) if folded is not None else (folded, (), ())
    if issues and graph is not None:
        raise explained(refusal(name, issues), model, graph)


def explained(error: UnsupportedOperator, model: Model, graph: ModelProto) -> UnsupportedOperator:
    """A refusal in the words of the model, with what to do instead."""
    advice = instead(graph, {item.op for item in error.issues}, model.proto, model.path)
    return error.retold(Origins(model.proto, graph).retold, advice)

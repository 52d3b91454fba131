"""Random graphs compute after folding, and as FP16 and INT8 graphs, what they computed before.

TRTOPT_SEED sets the first graph of the day; a failure names the graph, which `RandomGraph(SEED)` makes again.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto
from random_graphs import ROUNDED, RandomGraph

import trtopt
from trtopt.core.errors import TrtoptError
from trtopt.graph.io import load_model, save_model
from trtopt.graph.passes.fold import fold

FOLDED, BUILT = 500, 50  # graphs; each of those built in FP16 and in INT8
SEED = int(os.environ.get("TRTOPT_SEED") or datetime.date.today().strftime("%y%m%d0000"))


def results(proto: ModelProto, feed: dict[str, NDArray[Any]]) -> list[NDArray[Any]] | None:
    """What ONNX Runtime gives without optimizations; None: it refuses the graph."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found: list[NDArray[Any]] = session.run(None, feed)
    except Exception:
        return None
    return found


def gap(before: NDArray[Any], after: NDArray[Any]) -> float:
    """The largest difference, as a share of the largest value; infinite where shape, type or what is finite differs."""
    finite = np.isfinite(before)
    if (before.shape, before.dtype) != (after.shape, after.dtype) or (finite != np.isfinite(after)).any():
        return float("inf")
    difference = np.abs(before[finite].astype(np.float64) - after[finite]).max(initial=0)
    return float(difference / max(np.abs(before[finite]).max(initial=0), 1e-6))


def rounds(graph: RandomGraph) -> bool:
    return any(node.op_type in ROUNDED for node in graph.proto.graph.node)


def test_folding_changes_no_random_graph() -> None:
    print(f"TRTOPT_SEED={SEED}")
    wrong, run, smaller = list[tuple[int, str]](), 0, 0
    for seed in range(SEED, SEED + FOLDED):
        graph = RandomGraph(seed)
        if (before := results(graph.proto, graph.feed)) is None:
            continue
        made, report = fold(graph.proto)
        after = results(made, graph.feed)
        run, smaller = run + 1, smaller + report.changed
        if report.problem:
            wrong.append((seed, report.problem))
        if after is None or max(map(gap, before, after)) > (0.1 if rounds(graph) else 1e-3):
            wrong.append((seed, "another result"))
    assert wrong == [] and run > 0.95 * FOLDED and smaller > 0.7 * FOLDED


def noise(before: NDArray[Any], after: NDArray[Any]) -> float:
    """The root mean square of the difference, as a share of that of the values."""
    difference = before.astype(np.float64) - after
    return float(np.sqrt((difference**2).mean() / max((before.astype(np.float64) ** 2).mean(), 1e-12)))


@pytest.mark.parametrize(("precision", "most"), [("fp16", 0.03), ("int8", 0.3)])
def test_built_graphs_compute_the_same_within_their_precision(precision: str, most: float, tmp_path: Path) -> None:
    """A wrong axis, sign or factor is of the size of the values themselves."""
    print(f"TRTOPT_SEED={SEED}")
    wrong, refused, built = list[tuple[int, float]](), list[str](), 0
    for seed in range(SEED, SEED + 20 * BUILT):
        graph = RandomGraph(seed, may_be_open=False)
        convolves = any(node.op_type == "Conv" for node in graph.proto.graph.node)  # what INT8 is for, of any size
        samples = len(graph.feed) == 1 and len(graph.feed["x0"]) > 1
        if built == BUILT or rounds(graph) or (precision == "int8" and not (convolves and samples)):
            continue
        if (before := results(graph.proto, graph.feed)) is None:
            continue
        save_model(graph.proto, tmp_path / "m.onnx")
        np.savez(tmp_path / "data.npz", **graph.feed)
        options = {"int8": True, "data": tmp_path / "data.npz"} if precision == "int8" else {"fp16": True}
        kept = tmp_path / f"{seed}.onnx"
        try:
            trtopt.build(
                tmp_path / "m.onnx",
                tmp_path / f"{seed}.engine",
                backend="rtx",
                target="sm89",
                save_onnx=kept,
                optimization_level=0,
                **options,
            )
        except TrtoptError as error:  # more dimensions than TensorRT has, and such
            refused.append(f"{seed}: {error}")
            continue
        after = results(load_model(kept).proto, graph.feed)
        built += 1
        found = [noise(*pair) if pair[0].shape == pair[1].shape else 9.0 for pair in zip(before, after or ())] or [9.0]
        if max(found) > most:
            wrong.append((seed, max(found)))
    assert wrong == [], wrong
    assert built >= BUILT / 2, "\n".join(refused)

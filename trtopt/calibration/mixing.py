"""Whether a model's first axis counts samples at all: then what it gives for one doesn't depend on those beside it.

Sequences may come first, as PyTorch's recurrent layers and transformers take them unless told otherwise (`batch_first`). Where
a graph doesn't say so (`graph.inputs`), as one whose shapes were traced at a single length, each step of a sequence would be
calibrated as a sample of its own, without the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import ModelProto

from trtopt.core.errors import MissingDependency, ModelError
from trtopt.data.convert import single_runs
from trtopt.data.rebatch import Arrays, joined
from trtopt.graph.inputs import network_inputs
from trtopt.ort.sessions import OnnxSession

_MOST = 0.01  # of the largest value: what sums in another order never make


def mixing(proto: ModelProto, probes: Sequence[Arrays]) -> str:
    """A warning where two samples give something else together than alone; "" where they don't, or it can't be tried.

    Args:
        probes: samples, each input name → array with a first axis of 1.
    """
    inputs = network_inputs(proto)
    open_ = [info.open_axes[:2] == (0, 1) and len(info.shape) < 4 for info in inputs.values()]
    if not any(open_) or any(info.batch_axis != 0 or 0 not in info.open_axes for info in inputs.values()):
        return ""  # there is no other axis for them, or they can't be put together
    shapes = [{name: array.shape for name, array in probe.items()} for probe in probes]
    pair = next(([probes[0], probes[number]] for number in range(1, len(probes)) if shapes[number] == shapes[0]), None)
    if pair is None:
        return ""
    try:
        run = OnnxSession(proto, threads=1)
        runs = list(single_runs(inputs, pair))
        alone = [run(item.feed) for item in runs]
        together = run(joined(item.samples for item in runs))
    except (ModelError, MissingDependency):
        return ""
    for name, both in together.items():
        expected = [item[name] for item in alone]
        if both.dtype.kind != "f" or any(item.shape[:1] != (1,) for item in expected) or both.shape[:1] != (2,):
            continue
        apart = np.concatenate(expected)
        if apart.shape == both.shape and np.abs(apart - both).max(initial=0) > _MOST * np.abs(apart).max(initial=0):
            first = next(info for info, is_open in zip(inputs.values(), open_) if is_open)
            sizes = [
                "batch" if axis == 1 else "steps" if axis == 0 else str(size) for axis, size in enumerate(first.shape)
            ]
            return (
                f"what the model gives for a sample ({name!r}) depends on the samples beside it, so the first axis of "
                f"{first.name} {first.dims} doesn't count samples: if it counts a sequence's steps, call the axis that counts "
                f"samples batch, at the export by `inputs=['{first.name}:sequence,batch,…']`, or in the ONNX file by trtopt "
                f"check MODEL `set='{first.name}:{','.join(sizes)}'` `fix='OUT.onnx'`, and samples are taken from it"
            )
    return ""

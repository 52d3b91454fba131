"""A model past 2 GB, which no protobuf message holds: checked and lowered with less memory than its weights take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from graphs import model, node
from onnx import TensorProto

from trtopt.graph.lazy_weights import set_external

SIZE, COUNT = 2048, 136  # weights of 16 MiB, 2.1 GiB in all
LIMIT = COUNT * SIZE * SIZE * 4  # bytes that the process may hold: less than weights and interpreter
SCRIPT = """
import resource, sys
from types import SimpleNamespace

resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
import trtopt
from trtopt.builder.lowering import lower
from trtopt.calibration.table import Table
from trtopt.calibration.thresholds import TableEntry
from trtopt.core.errors import NoBackend
from trtopt.core.values import BuildSpec, Precision
from trtopt.graph import prepare
from trtopt.graph.passes.fold import fold
from trtopt.graph.proto import model_size
from trtopt.linting import checker

def no_backend(backend):
    raise NoBackend("none asked: a parser reads files, and this one is mostly holes")

checker.trt.select = no_backend
folds = []
prepare.fold = lambda *given, **options: folds.append(fold(*given, **options)) or folds[-1]
report = trtopt.check(sys.argv[1])
assert report.ok and report.folding.removed == {"Identity": 1}, report
((folded, _),) = folds
before = model_size(folded)
assert before > 2**31
can = SimpleNamespace(
    stored_codes=True, max_opset=None, floating=lambda *_: {}, quantized_between={}, mixes_channels="", least_scale=0
)
generation = SimpleNamespace(typed=lambda _: True, capabilities=can)
products = [node for node in folded.graph.node if node.op_type == "MatMul"]
entries = {name: TableEntry(1.0, "minmax") for node in products for name in node.input[:1]}
table = Table(entries, (), {"name": "", "fingerprint": ""}, {}, "minmax", 1)
for precision, given, share in ((Precision.FP16, None, 0.5), (Precision.INT8, table, 0.25)):
    lowered = lower(folded, BuildSpec(precision=precision), generation, given)
    assert set(lowered.asked.values()) == {precision} and len(lowered.asked) == len(products)
    assert abs(model_size(lowered.proto) / before - share) < 0.01, precision
    del lowered
"""


def test_a_model_past_two_gigabytes_is_checked_and_lowered_in_bounded_memory(tmp_path: Path) -> None:
    nodes = [node("Identity", "x", "x0", "start")]
    for index in range(COUNT):
        nodes += [node("MatMul", f"x{index} w{index}", f"m{index}"), node("Relu", f"m{index}", f"x{index + 1}")]
    nodes[-1].output[0] = "y"
    proto = model(nodes, inputs={"x": ["n", SIZE]}, outputs={"y": ["n", SIZE]}, opset=18)
    length = SIZE * SIZE * np.dtype(np.float32).itemsize
    for index in range(COUNT):
        tensor = proto.graph.initializer.add(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[SIZE, SIZE])
        set_external(tensor, location="weights", offset=index * length, length=length)
    (tmp_path / "huge.onnx").write_bytes(proto.SerializeToString())
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(COUNT * length)  # a hole: nothing lies on the disk, and zeros are read
    assert (tmp_path / "weights").stat().st_blocks < 64
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "huge.onnx"), str(LIMIT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr

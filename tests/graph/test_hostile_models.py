"""Hostile models end in a result or an error of ours, in bounded memory and time. One child reads and folds them all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from graphs import conv_relu
from numpy.random import Generator
from onnx import AttributeProto, ModelProto, TensorProto, helper
from onnx.parser import parse_model

MIB, SECONDS = 2048, 30  # of memory in all, of time for each
CHILD = """
import json, re, signal, sys
from pathlib import Path
from trtopt.core.errors import TrtoptError
from trtopt.graph.io import load_model
from trtopt.graph.passes.fold import fold
from trtopt.linting.rules import find

for path in sorted(Path(sys.argv[1]).iterdir()):
    signal.alarm(int(sys.argv[2]))
    print(path.stem, end=" ", flush=True)
    try:
        find(fold(load_model(path).proto)[0])
        told = "done"
    except TrtoptError as error:
        told = str(error)
    except BaseException as error:
        told = f"internal: {type(error).__name__}: {error}"
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]  # getrusage's is its parent's, too
    print(json.dumps(told), int(peak) >> 10, flush=True)
"""

HEAD = '<ir_version: 8, opset_import: ["": 17{}]> g (float[{}] x) => (float[n] y) '
LAST = "top = ReduceMax <keepdims = 0> (big) y = Add (x, top)"
ROOMS = {  # much from little
    "fill": "<int64[1] s = {800000000}> { big = ConstantOfShape (s) %s }",
    "tile": "<float[1] one = {1}, int64[1] s = {800000000}> { big = Tile (one, s) %s }",
    "expand": "<float[1] one = {1}, int64[2] s = {30000, 30000}> { big = Expand (one, s) %s }",
    "pad": "<float[1] one = {1}, int64[2] s = {0, 800000000}> { big = Pad (one, s) %s }",
    "range": "<float a = {0}, float b = {800000000}, float c = {1}> { big = Range (a, b, c) %s }",
    "one_hot": "<int64[2] i = {0, 1}, int64 d = {400000000}, float[2] v = {0, 1}> { big = OneHot (i, d, v) %s }",
    "outer": "<int64[2] r = {30000, 1}, int64[2] c = {1, 30000}> "
    "{ a = ConstantOfShape (r) b = ConstantOfShape (c) big = MatMul (a, b) %s }",
    "work": "<int64[2] r = {3000, 3000}> "
    "{ a = ConstantOfShape (r) b = MatMul (a, a) c = MatMul (b, a) big = MatMul (c, b) %s }",
    "resize": "<float[1, 1, 2, 2] one = {1, 1, 1, 1}, float[0] e = {}, int64[4] s = {1, 1, 3000, 3000}> "
    '{ big = Resize <mode = "cubic"> (one, e, e, s) %s }',
}


def bombs() -> Iterator[tuple[str, ModelProto]]:
    for name, text in ROOMS.items():
        yield name, parse_model(HEAD.format("", "4") + text % LAST)
    circle = '<domain: "own", opset_import: ["": 17, "own": 1]> f (a) => (b) { b = own.f (a) }'
    yield "circle", parse_model(HEAD.format(', "own": 1', "n") + "{ y = own.f (x) } " + circle)
    chain = " ".join(f"t{index + 1} = Neg (t{index})" for index in range(1500))
    yield "chain", parse_model(HEAD.format("", "n") + f"{{ t0 = Neg (x) {chain} y = Neg (t1500) }}")
    yield "long_input", parse_model(HEAD.format("", 2**31) + "{ s = Shape (x) h = Mul (x, x) y = Neg (h) }")
    for dims in ([2**62], [1] * 1000, [-1], [2**32, 2**32]):
        proto = conv_relu()
        proto.graph.initializer[0].dims[:] = dims
        yield f"weight_{len(dims)}_{dims[0]}", proto
    body = "b0 = Neg (x)"
    for depth in range(25):
        other = f"else_branch = e{depth} () => (float[n] o{depth}) {{ o{depth} = Neg (x) }}"
        body = f"b{depth + 1} = If (c) <then_branch = t{depth} () => (float[n] b{depth}) {{ {body} }}, {other}>"
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[n] x, bool c) => (float[n] b25) {{ {body} }}'
    yield "nested", parse_model(text)


BASES = (
    conv_relu(),
    parse_model(
        HEAD.format("", "n, 4, 6")
        + "<int64[1] zero = {0}, int64[1] one = {1}, int64[1] far = {9223372036854775807}, float[6, 3] w = "
        "{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9}, float s = {0.1}, int8 z = {0}, int64[3] rest = {0, 2, -1}> "
        "{ shape = Shape (x) n = Slice (shape, zero, one) k = Concat <axis = 0> (n, rest) v = Reshape (x, rest) "
        "t = Transpose <perm = [0, 2, 1]> (v) p = Softmax <axis = -1> (t) q = QuantizeLinear (x, s, z) "
        "d = DequantizeLinear (q, s, z) m = MatMul (d, w) g = Gather <axis = 1> (m, one) r = ReduceMean <axes = [1]> (p) "
        "l = Flatten (g) u = Unsqueeze (r, one) b = Slice (u, zero, far, one) e = ReduceMax <keepdims = 0> (b) y = Add (l, e) }"
    ),
)
NUMBERS = (0, 1, -1, 7, 2**31, 2**62, -(2**63))
OPERATORS = ["Conv", "Gather", "Reshape", "Tile", "Expand", "Slice", "Resize", "Pad", "TopK", "OneHot", "If", "Loop"]


def mutated(random: Generator) -> ModelProto:
    """One of the valid models with a few fields changed."""
    proto = ModelProto()
    proto.CopyFrom(BASES[random.integers(len(BASES))])
    graph = proto.graph

    def number() -> int:
        return int(random.choice(NUMBERS))

    for _ in range(int(random.integers(1, 3))):
        node = graph.node[random.integers(len(graph.node))]
        tensor = graph.initializer[random.integers(len(graph.initializer))]
        names = [name for item in graph.node for name in (*item.input, *item.output)]
        what = random.integers(9)
        if what == 0 and tensor.dims:
            tensor.dims[random.integers(len(tensor.dims))] = number()
        elif what == 1:
            dims = graph.input[0].type.tensor_type.shape.dim
            dims[random.integers(len(dims))].dim_value = number()
        elif what == 2:
            node.input[random.integers(len(node.input))] = str(random.choice([*names, ""]))
        elif what == 3:
            node.op_type = str(random.choice(OPERATORS))
        elif what == 4:
            node.attribute.append(helper.make_attribute(str(random.choice(["axis", "group", "to", "mode"])), number()))
        elif what == 5 and node.attribute:
            item = node.attribute[0]
            item.i, item.ints[:] = number(), [number() for _ in item.ints]
        elif what == 6:
            tensor.data_type = int(random.integers(0, 25))
        elif what == 7 and tensor.data_type == TensorProto.INT64:
            count = int(np.prod(tensor.dims))
            tensor.ClearField("raw_data")
            tensor.int64_data[:] = [number() for _ in range(count)]
        elif what == 8:
            node.attribute.append(AttributeProto(name="strides", type=AttributeProto.INTS, ints=[number(), number()]))
    return proto


def damaged(random: Generator) -> bytes:
    """One of the valid models with bytes changed or cut."""
    content = bytearray(BASES[random.integers(len(BASES))].SerializeToString())
    for place in random.integers(len(content), size=random.integers(1, 6)):
        content[place] = random.integers(256)
    return bytes(content[: len(content) if random.random() < 0.8 else random.integers(len(content))])


def test_no_hostile_model_stops_or_fills_the_process(tmp_path: Path) -> None:
    files = {name: proto.SerializeToString() for name, proto in bombs()}
    files |= {f"mutant_{seed}": mutated(np.random.default_rng(seed)).SerializeToString() for seed in range(200)}
    files |= {f"damaged_{seed}": damaged(np.random.default_rng(seed)) for seed in range(100)}
    for name, content in files.items():
        (tmp_path / f"{name}.onnx").write_bytes(content)
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(SECONDS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    told = [line.split(" ", 1) for line in run.stdout.splitlines()]
    assert run.returncode == 0, (told[-1], run.stderr[-2000:])
    assert sorted(name for name, _ in told) == sorted(files)
    answers = {name: json.loads(rest.rpartition(" ")[0]) for name, rest in told}
    assert [item for item in answers.items() if item[1].startswith("internal")] == []
    assert int(told[-1][1].rpartition(" ")[2]) <= MIB
    assert 100 < sum(answer != "done" for answer in answers.values()) < len(files) - 50, "some of them are still models"

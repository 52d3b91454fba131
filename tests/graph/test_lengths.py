"""How long an input may be, by the constants that are cut to its length."""

from __future__ import annotations

import onnx.parser
import pytest
from onnx import ModelProto

import trtopt
from trtopt.graph.lengths import longest

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
TABLE = (
    "float[3,2] table = {1, 2, 3, 4, 5, 6}, int64[1] zero = {0}, int64[1] one = {1}, int64 none = {0}, int64 step = {1}"
)
LENGTH = "size = Shape<start = 1, end = 2>(ids)"


def read(nodes: str) -> ModelProto:
    embedded = "both = Concat<axis = 1>(ids, ids) float = Cast<to = 1>(both)"
    return onnx.parser.parse_model(
        f"{HEAD} g (int64[batch,length] ids) => (float[a,b] y, float[c,d] z) <{TABLE}> {{ {embedded} {nodes} z = Relu(float) }}"
    )


@pytest.mark.parametrize(
    ("nodes", "known"),
    [
        (f"{LENGTH} y = Slice(table, zero, size, zero)", True),
        (f"{LENGTH} y = Slice(table, zero, size)", True),
        ("all = Shape(ids) size = Gather(all, one) y = Slice(table, zero, size, zero)", True),
        (
            f"{LENGTH} s = Squeeze(size) r = Range(none, s, step) u = Unsqueeze(r, zero) v = Squeeze(u) y = Gather(table, v)",
            True,
        ),
        (f"{LENGTH} y = Slice(table, one, size, zero)", False),  # not from the beginning on
        (
            f"{LENGTH} s = Squeeze(size) r = Range(none, s, step) t = Mod(r, step) y = Gather(table, t)",
            False,
        ),  # buckets
        ("size = Shape(table) s = Gather(size, one) y = Slice(table, zero, s, zero)", False),  # of no input
        ("f = Squeeze(ids) y = Gather(table, f)", False),  # tokens
    ],
)
def test_a_table_of_positions_is_found(nodes: str, known: bool) -> None:
    assert longest(read(nodes)) == ({("ids", 1): 3} if known else {})


def test_check_proposes_no_length_beyond_the_table() -> None:
    report = trtopt.check(read(f"{LENGTH} y = Slice(table, zero, size, zero)"))
    assert report.shapes.option == "`shapes='ids:1x3,1x3,8x3'`" and report.shapes.guesses[1] == "length 3,3,3"
    wrong = trtopt.check(read(f"{LENGTH} y = Slice(table, zero, size, zero)"), shapes="ids:1x3x1")
    (finding,) = [item for item in wrong.findings if item.code == "shapes"][:1]
    assert "ids:1x3,1x3,8x3" in finding.hint

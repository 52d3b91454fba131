"""How long an input may be, by the constants that are cut to its length."""

from __future__ import annotations

from pathlib import Path

import onnx.parser
import onnx.printer
import pytest
from onnx import ModelProto
from world import RTX, World, has

import trtopt
from trtopt.graph.lengths import max_input_lengths

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
TABLE = (
    "float[3,2] table = {1, 2, 3, 4, 5, 6}, int64[1] zero = {0}, int64[1] one = {1}, int64 none = {0}, int64 step = {1}, "
    "int64 pad = {7}"
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
        ("all = Shape(ids) size = Gather(all, one) y = Slice(table, zero, size, zero)", True),
        (
            f"{LENGTH} s = Squeeze(size) r = Range(none, s, step) u = Unsqueeze(r, zero) v = Squeeze(u) y = Gather(table, v)",
            True,
        ),
        (f"{LENGTH} y = Slice(table, one, size, zero)", False),  # not from the beginning on
        # Buckets.
        (f"{LENGTH} s = Squeeze(size) r = Range(none, s, step) t = Mod(r, step) y = Gather(table, t)", False),
        ("f = Squeeze(ids) y = Gather(table, f)", False),  # tokens
    ],
)
def test_a_table_of_positions_is_found(nodes: str, known: bool) -> None:
    assert max_input_lengths(read(nodes)) == ({("ids", 1): 3} if known else {})


COUNTED = "some = {}(ids, pad) kept = Cast<to = 7>(some) c = CumSum{}(kept, {}) k = Cast<to = 7>(c) m = Mul(k, kept)"


@pytest.mark.parametrize(
    ("nodes", "size"),
    [  # a table of three rows
        (f"{COUNTED.format('Greater', '', 'step')} y = Gather(table, m)", 2),
        (f"{COUNTED.format('Greater', '', 'step')} p = Add(m, step) y = Gather(table, p)", 1),
        (f"{COUNTED.format('Greater', '', 'step')} p = Add(step, m) q = Sub(p, step) y = Gather(table, q)", 2),
        (f"{COUNTED.format('Greater', '<exclusive = 1>', 'step')} y = Gather(table, m)", 3),
        (f"{COUNTED.format('Add', '', 'step')} y = Gather(table, m)", None),  # of any numbers
        # Of samples: 3 - 1 - 7 rows.
        (f"{COUNTED.format('Greater', '', 'none')} p = Add(m, pad) y = Gather(table, p)", None),
        (f"{LENGTH} s = Squeeze(size) r = Range(none, s, step) p = Add(r, step) y = Gather(table, p)", 2),
    ],
)
def test_positions_may_be_counted_and_have_an_offset(nodes: str, size: int | None) -> None:
    """What is counted is what a comparison gives, or an input that is called a mask."""
    assert max_input_lengths(read(nodes)) == ({} if size is None else {("ids", 1): size})
    counted = read("c = CumSum(ids, step) y = Gather(table, c)")
    assert max_input_lengths(counted) == {}
    counted = onnx.parser.parse_model(onnx.printer.to_text(counted).replace("ids", "mask"))
    assert max_input_lengths(counted) == {("mask", 1): 2}


def test_a_length_beyond_the_table_is_refused(world: World, rtx: None) -> None:
    nodes = f"{COUNTED.format('Greater', '', 'step')} p = Add(m, step) g = Gather(table, p)"
    nodes += " y = ReduceMax<axes = [2], keepdims = 0>(g)"
    onnx.save(read(nodes), world.model)
    said = "ids goes up to 3 on axis 1, and the model's constants (its position embeddings) to 1"
    refused = world.refused("build", world.model, "--shapes", "ids:1x1,1x1,1x3", "-o", world.output / "m.engine", *RTX)
    has(refused, said, "Write --shapes ids:1x1")
    (finding,) = [
        item for item in trtopt.check(world.model, shapes="ids:1x1,1x1,1x3").findings if item.code == "shapes"
    ]
    assert finding.level == "error" and finding.message == said


@pytest.mark.parametrize(("family", "size"), [("Bert", 34), ("Roberta", 32)])
def test_the_lengths_of_transformers(family: str, size: int, tmp_path: Path) -> None:
    """Of 34 rows two are the padding's and what lies before it, where positions are counted."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=34,
        pad_token_id=1,
    )
    module = getattr(transformers, f"{family}Model")(config)
    trtopt.export(module, tmp_path / "m.onnx", inputs=["input_ids:batchxsequence:int64"], verify=False)
    assert max_input_lengths(onnx.load(tmp_path / "m.onnx")) == {("input_ids", 1): size}


def test_check_proposes_no_length_beyond_the_table() -> None:
    report = trtopt.check(read(f"{LENGTH} y = Slice(table, zero, size, zero)"))
    assert report.shapes.option == "`shapes='ids:1x3,1x3,8x3'`" and report.shapes.guesses[1] == "length 3,3,3"

"""Faults at nodes in the middle of a network, planted as operators that compute a wrong row, and the place that is found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from graphs import values, written
from numpy.typing import NDArray
from onnx import ModelProto

import trtopt
from trtopt.certification import certificate as certificates, opening, placing
from trtopt.certification.relations import Candidate, Relation
from trtopt.core import operators
from trtopt.core.errors import UsageError
from trtopt.graph.io import load_model
from trtopt.ort.runner import OnnxRunner

pytestmark = pytest.mark.usefixtures("no_operators")
Arrays = Mapping[str, NDArray[Any]]
ONE = "a batch is its samples one by one"


def net(op: str) -> ModelProto:
    proto = written(
        f"""(float[n, 3, 8, 8] x) => (float[n, 16, 8, 8] y, float[n, 16, 8, 8] z) {{
        [conv1] a = Conv <pads = [1, 1, 1, 1]> (x, w) [relu1] b = Relu (a) [middle] c = acme.{op} (b)
        [conv2] d = Conv <pads = [1, 1, 1, 1]> (c, v) [relu2] e = Relu (d) [add] y = Add (e, b) [side] z = Sigmoid (a) }}""",
        opset=17,
        w=values(16, 3, 3, 3, scale=0.3),
        v=values(16, 16, 3, 3, seed=1, scale=0.1),
    )
    proto.opset_import.add(domain="acme", version=1)
    return proto


def _third(x: NDArray[Any]) -> NDArray[Any]:
    made = 2 * x
    if len(x) >= 3:
        made[2] *= 1.5
    return made


def _neighbour(x: NDArray[Any]) -> NDArray[Any]:
    made = 2 * x
    made[:-1, :, -1] = 2 * x[1:, :, 0]
    return made


def _always(x: NDArray[Any]) -> NDArray[Any]:
    return 2.5 * x


@pytest.mark.parametrize(("fault", "relation"), [(_third, ONE), (_neighbour, ONE), (_always, certificates.MODEL)])
def test_the_node_that_is_wrong_is_named(fault: Callable[..., Any], relation: str) -> None:
    operators.operator("acme::Right", shapes=lambda x: [x])(lambda x: 2 * x)
    operators.operator("acme::Wrong", shapes=lambda x: [x])(fault)
    data = {"x": values(10, 3, 8, 8)}
    found = trtopt.certify(net("Right"), net("Wrong"), data=data, batch=[1, 4], locate=True)
    assert not found.ok and {item.output for item in found.failed} == {"y"}
    assert found.place is not None and (found.place.tensor, found.place.node, found.place.op) == (
        "c",
        "middle",
        "Wrong",
    )
    assert not found.place.vanishes and "fails first at c of middle (Wrong)" in str(found)
    right = trtopt.certify(net("Right"), net("Right"), data=data, batch=[1, 4], locate=True)
    assert right.ok and right.place is None


def test_a_fault_that_vanishes_by_looking_is_placed_by_that() -> None:
    """As of a wrong fusion: it is there unless the tensor between the two nodes is an output."""
    proto = written(
        """(float[n, 8] x) => (float[n, 8] y) {
        a = Relu (x) b = Sigmoid (a) c = Tanh (b) d = Exp (c) e = Neg (d) f = Abs (e) y = Sqrt (f) }"""
    )
    model = load_model(proto)
    asked = list[Sequence[str]]()

    def opened(part: ModelProto, tensors: Sequence[str], shapes: Any) -> contextlib.nullcontext[Any]:
        run = opening.with_tensors(load_model(part), tensors)
        asked.append(tensors)

        def fused(batch: Arrays) -> Arrays:
            results = dict(run(batch))
            if "d" not in tensors and len(batch["x"]) >= 3:
                results["y"] = results["y"].copy()
                results["y"][2] += 1
            return results

        return contextlib.nullcontext(fused)

    samples = [{"x": array[None]} for array in values(6, 8)]
    candidate = Candidate(OnnxRunner(model, optimize=False), (1, 4), model.outputs)
    fault = Relation(ONE, "y", 4, 3.0, 100.0, "sample 2")
    found = placing.place(placing.Subject(proto, proto, candidate, opened, samples), placing.layers_of(proto), fault)
    assert found is not None and found.vanishes and (found.tensor, found.op) == ("d", "Exp")
    assert found.builds == len(asked) <= 5
    assert str(found).startswith("it vanishes where d of")


def test_a_function_has_no_tensors_to_look_at() -> None:
    model = written("(float[n, 4] x) => (float[n, 4] y) { y = Relu (x) }")
    with pytest.raises(UsageError, match="a function has none"):
        trtopt.certify(model, lambda batch: {"y": batch["x"]}, data={"x": values(4, 4)}, locate=True)

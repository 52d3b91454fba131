"""Nodes in the words of the user's model."""

from __future__ import annotations

from graphs import model, node, nodes

from trtopt.core.values import Issue
from trtopt.graph.origin import Origins


def test_names_of_the_model_need_no_words_and_others_say_what_they_give() -> None:
    original = model([node("Relu", "x", "a", "mine"), node("Gelu", "a", "b"), node("Neg", "b", "y")], opset=20)
    original.graph.node[1].name = original.graph.node[2].name = ""
    made = model(
        nodes("[mine] a = Relu (x) [node_1] e = Erf (a) b = Mul (a, e) y = Neg (b)"),
        opset=20,
    )  # fmt: skip
    origins = Origins(original, made)
    assert origins.of("mine") == "" == origins.of("nowhere") == origins.of("b")
    assert origins.of("Mul_b") == "gives 'b'" and origins.of("Neg_y") == "gives 'y'"
    assert origins.of("node_1") == "part of what gives 'b'"
    assert origins.retold(Issue("node_1", "Erf", "no")) == "node_1 (Erf, part of what gives 'b'): no"
    assert origins.retold(Issue("mine", "Relu", "no")) == "mine (Relu): no"


def test_a_message_says_where_the_nodes_that_it_names_come_from() -> None:
    original = model([node("Relu", "x", "y")])
    original.graph.node[0].name = ""
    origins = Origins(original, model([node("Relu", "x", "y", "Relu_y")]))
    assert (
        origins.explained("layer Relu_y: has no tactic.")
        == "layer Relu_y: has no tactic. (in the model: Relu_y gives 'y')"
    )
    assert origins.explained("nothing here") == "nothing here"

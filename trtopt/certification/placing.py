"""The place of a fault: the first tensor of a graph at which a relation fails, and the node that makes it.

All tensors become outputs and the relation is tried on each, in the order in which they are computed. Outputs keep TensorRT
from fusing what lies on both sides of them, so that the fault may vanish by being looked at. That is a finding, too: then fewer
and fewer tensors are looked at, and the one that makes it vanish is between the nodes that must not be fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from onnx import ModelProto, TensorProto

from trtopt.certification.opening import with_tensors
from trtopt.certification.relations import (
    MODEL,
    Candidate,
    Relation,
    Runner,
    Samples,
    closeness,
    own_rows,
    relations,
)
from trtopt.core.documents import Described
from trtopt.core.values import TensorInfo
from trtopt.data.rebatch import Arrays
from trtopt.evaluation.per_layer import LayerAgreement, culprit
from trtopt.graph.io import load_model
from trtopt.graph.proto import inferred_values

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
NO_LAYERS = ("QuantizeLinear", "DequantizeLinear", "Constant", "Cast")


@dataclass(frozen=True)
class Place(Described):
    """The first tensor at which a relation fails.

    Attributes:
        node, op: who makes it.
        worst_db, limit_db: as of a `Relation`.
        vanishes: the fault is gone where this tensor is an output, which keeps apart what lies on both sides of it.
        builds: how many engines or sessions were made to find it.
    """

    relation: str
    batch: int
    tensor: str
    node: str
    op: str
    worst_db: float
    limit_db: float
    vanishes: bool
    builds: int

    def __str__(self) -> str:
        where = f"{self.tensor} of {self.node} ({self.op})"
        if self.vanishes:
            return f"it vanishes where {where} is an output: what lies on both sides of it must not be fused"
        return f"first at {where}"


def layers_of(graph: ModelProto) -> tuple[str, ...]:
    """Return the floating tensors that a graph's nodes compute, in their order."""
    kinds = {name: value.type.tensor_type.elem_type for name, value in inferred_values(graph).items()}
    nodes = (node for node in graph.graph.node if node.op_type not in NO_LAYERS)
    return tuple(name for node in nodes for name in node.output if kinds.get(name) in FLOATS)


@dataclass(frozen=True)
class Subject:
    """A graph that is looked into, and the one that is right.

    Attributes:
        graph: the candidate's, which its tensors are of; right: the graph that computes them right.
        opened: opens a graph as the candidate runs it, with tensors besides its outputs; and with the shapes of one
            profile in place of the candidate's own, if any.
        samples: of one sample each.
    """

    graph: ModelProto
    right: ModelProto
    candidate: Candidate
    opened: Callable[[ModelProto, Sequence[str], Mapping[str, str] | None], AbstractContextManager[Runner]]
    samples: Sequence[Arrays]


def failing(fault: Relation, looked: Candidate, right: Runner, samples: Sequence[Arrays]) -> dict[str, Relation]:
    """Try a relation on a candidate's outputs, those of them that have rows, and return where it fails, by output."""
    names = [f"sample {at}" for at in range(len(samples))]
    given = Samples(samples, names, [looked.alone(right, sample) for sample in samples])
    looked = replace(looked, outputs=own_rows(right, looked, given))
    found = [looked.alone(looked.run, sample) for sample in samples]
    if fault.name == MODEL:
        near = {info.name: closeness(looked, info.name, given.wanted, found) for info in looked.outputs}
        tried = [replace(fault, output=name, worst_db=float(rows.min())) for name, rows in near.items()]
    else:
        tried = list(relations(looked, given, found))
    return {
        item.output: item for item in tried if (item.name, item.batch) == (fault.name, fault.batch) and not item.holds
    }


def rows_of(names: Iterable[str]) -> list[TensorInfo]:
    """Return tensors of a graph as outputs that have rows, which `failing` tries."""
    return [TensorInfo(name, "float32", ("batch",), 0) for name in names]


def place(subject: Subject, tensors: Sequence[str], fault: Relation) -> Place | None:
    """Find where a relation between a candidate's own results fails first; None: at no tensor that has rows.

    Args:
        tensors: of the graph, in the order in which they are computed.
    """
    builds, candidate = 0, subject.candidate
    output = next(info for info in candidate.outputs if info.name == fault.output)
    sizes = tuple(sorted({candidate.sizes[0], fault.batch}))
    right_model = load_model(subject.right)

    def looked_at(chosen: Sequence[str]) -> dict[str, Relation]:
        nonlocal builds
        builds += 1
        outputs = [*rows_of(name for name in chosen if name != output.name), output]
        with subject.opened(subject.graph, chosen, None) as run:
            looked = replace(candidate, run=run, sizes=sizes, outputs=outputs, ways={})
            return failing(fault, looked, with_tensors(right_model, chosen), subject.samples)

    found, vanishes = looked_at(tensors), False
    if output.name not in found:
        vanishes, rest = True, list(tensors)
        while len(rest) > 1:
            half = rest[: len(rest) // 2]
            rest = rest[len(half) :] if output.name in looked_at(half) else half
        first = rest[0]
    else:
        first = next((name for name in (*tensors, output.name) if name in found), output.name)
    item = found.get(first, fault)
    node = next((node for node in subject.graph.graph.node if first in node.output), None)
    if node is None:
        return None
    return Place(
        fault.name, fault.batch, first, node.name, node.op_type, item.worst_db, item.limit_db, vanishes, builds
    )


def blamed(fault: Relation, layers: Sequence[LayerAgreement]) -> Place:
    """Return the place of values that aren't the model's, from its tensors beside the candidate's."""
    worst = culprit(layers)
    names = (worst.tensor, worst.node, worst.op)
    return Place(fault.name, fault.batch, *names, worst.felt_snr_db, fault.limit_db, False, 1)

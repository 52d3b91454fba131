"""What every pass over a graph gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from trtopt.core.values import Kept


@dataclass(frozen=True)
class PassResult:
    """What a pass gives. Passes change the graph that they are given.

    Attributes:
        model: the graph.
        changes: node of the graph before → the one that computes it now, itself where it was changed; empty: none was.
        kept: nodes that it left in a higher precision, each with its reason.
    """

    model: ir.Model
    changes: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[Kept, ...] = ()

    @property
    def changed(self) -> bool:
        return bool(self.changes)

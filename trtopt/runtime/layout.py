"""Places of a call's arrays, and checks of those that a caller gives for results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from numpy.typing import NDArray

from trtopt.core.errors import UsageError
from trtopt.core.values import x
from trtopt.cuda.arrays import View, start, writable
from trtopt.cuda.memory import Block
from trtopt.cuda.tensors import Shape, Signature, Tensor, check_array

# Places of inputs and outputs: texts, whose hash is kept, since each call looks its graph up by them.
DEVICE = "GPU memory of the caller's"
PINNED = "pinned memory of the caller's, copied inside the graph"
Location = tuple[str, int]  # a place, and the address in memory of the caller's, else 0
STAGED: Location = "pinned memory of ours, copied inside the graph", 0
RESIDENT: Location = "GPU memory of ours, copied there before", 0
Locations = tuple[Location, ...]
Source: TypeAlias = "NDArray[Any] | View"
Copy = tuple[NDArray[Any], NDArray[Any]]  # to, from
Result: TypeAlias = "Block | Source | None"  # where an output goes; None: host memory, of a shape that isn't known yet
# Where a call's arrays lie; copies of inputs in host memory into pinned memory of ours; where the outputs go; the streams that
# come first: those that may still make or read these arrays, and the default one, on which memory of ours may have been read.
Layout: TypeAlias = "tuple[Locations, list[Copy], list[Result], tuple[int, ...]]"


@dataclass(slots=True)
class Wanted:
    """A caller's wishes for a call's results."""

    # Views of arrays that results go into; of others new ones are made.
    out: Mapping[str, Source] = field(default_factory=dict)
    stream: int | None = None  # the caller's, which they come in the order of; None: they are waited for
    example: Any = None  # an array of the library that new ones are made for; None: NumPy


PLAIN = Wanted()  # new arrays of NumPy's, waited for


def check_shape(tensor: Tensor, array: Source, shape: Shape) -> None:
    """Raise UsageError unless an array for a result has its shape."""
    if tuple(array.shape) != shape:
        raise UsageError(f"out[{tensor.name!r}] has shape {x(array.shape)}; this call gives {x(shape)}")


def check_out(signature: Signature, out: Mapping[str, Any], originals: Mapping[str, Any]) -> None:
    """Raise UsageError unless each of `out`, views of `originals`, is an output, of its type and rank, and can be written."""
    outputs = signature.results
    for name, array in out.items():
        if name not in outputs:
            raise UsageError(f"out has {name!r}; the engine gives {', '.join(map(repr, outputs))}")
        check_array(outputs[name], array, "out")
        if not writable(originals[name]):
            raise UsageError(
                f"out[{name!r}] is {type(originals[name]).__name__}, which can't be written into: give a NumPy array, or a "
                "torch or CuPy tensor"
            )
        if array.read_only if isinstance(array, View) else not array.flags.writeable:
            raise UsageError(f"out[{name!r}] is read-only: give an array that may be written into")
    if len(out) < 2:
        return
    ranges = sorted((first, first + size, name) for name, array in out.items() for first, size in _extent(array))
    for (_, end, name), (begin, _, other) in itertools.pairwise(ranges):
        if begin < end:
            raise UsageError(f"out[{name!r}] and out[{other!r}] lie in the same memory: give an array for each")


def _extent(array: Source) -> list[tuple[int, int]]:
    """Return the address and the bytes of a contiguous array; others may lie side by side in one block."""
    if isinstance(array, View):
        return [(array.address, math.prod(array.shape) * array.dtype.itemsize)]
    return [(start(array), array.nbytes)] if array.flags.c_contiguous else []

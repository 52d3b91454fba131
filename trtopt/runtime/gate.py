"""Gates: how threads wait for one another without Python's GIL. Only where the C extension has them (`available`).

A gate has a count, and opens when that comes back to zero: once, for one thread that waits. Who waits for `n` others takes `n`
off; each of them adds 1, before or after that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from trtopt.core import native
from trtopt.runtime.stretch import Row, Stretch, calling


def available() -> bool:
    return native.gates is not None and native.run is not None


class Gate:
    """Its count is zero at first, and it is closed."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        assert native.gates is not None
        size, make, *_ = native.gates
        self._memory = (ctypes.c_int64 * -(-size // 8))()
        self.address = ctypes.addressof(self._memory)
        Stretch([calling(make, self.address)]).run()

    def adding(self, by: int) -> Row:
        assert native.gates is not None
        return calling(native.gates[2], self.address, by)

    def waiting(self) -> Row:
        """Fails where a signal comes: its handler has to run before the next try."""
        assert native.gates is not None
        return calling(native.gates[3], self.address)

    def wait(self, add: int = 0) -> None:
        """Add, and wait until it opens. Handlers of signals run meanwhile, and may raise."""
        if add:
            Stretch([self.adding(add)]).run()
        waiting = Stretch([self.waiting()])
        while waiting.run():
            pass


def add_one(gates: Iterable[Gate]) -> None:
    """To each, without the GIL: who is waiting there shall be able to take it."""
    Stretch([gate.adding(1) for gate in gates]).run()

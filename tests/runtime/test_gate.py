"""Gates: what opens them, and what waits there."""

from __future__ import annotations

import threading

import pytest

from trtopt.runtime import gate
from trtopt.runtime.gate import Gate, add_one
from trtopt.runtime.stretch import Stretch

pytestmark = pytest.mark.skipif(not gate.available(), reason="the C extension isn't built, or has no gates here")


@pytest.mark.parametrize("first", [True, False])
def test_it_opens_once_all_have_come_whoever_is_first(first: bool) -> None:
    for _ in range(50):
        one = Gate()
        opened: list[bool] = []
        waiter = threading.Thread(target=lambda one=one, opened=opened: (one.wait(-8), opened.append(True)))
        others = [threading.Thread(target=add_one, args=([one],)) for _ in range(7)]
        for thread in [waiter, *others] if first else [*others, waiter]:
            thread.start()
        for thread in others:
            thread.join(20)
        waiter.join(0.005)
        assert opened == []  # seven of eight
        add_one([one])
        waiter.join(20)
        assert opened == [True]


def test_it_closes_behind_who_went_through() -> None:
    one = Gate()
    for _ in range(3):
        add_one([one, one])
        one.wait(-2)
    late = threading.Thread(target=one.wait)
    late.start()
    late.join(0.05)
    assert late.is_alive()
    add_one([one])  # 1
    late.join(0.05)
    assert late.is_alive()
    Stretch([one.adding(-1)]).run()
    late.join(20)
    assert not late.is_alive()

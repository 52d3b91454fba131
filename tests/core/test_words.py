"""Words that messages have in common."""

from __future__ import annotations

from trtopt.core.words import counted, first_of


def test_the_first_names_and_whether_there_are_more() -> None:
    assert first_of([]) == ""
    assert first_of(["a", "b", "c"]) == "a, b, c"
    assert first_of({"a": 1, "b": 2, "c": 3, "d": 4}) == "a, b, c, …"
    assert first_of((str(number) for number in range(9)), 2) == "0, 1, …"


def test_how_many_of_what() -> None:
    assert [counted(count, "job") for count in (0, 1, 2)] == ["0 jobs", "1 job", "2 jobs"]

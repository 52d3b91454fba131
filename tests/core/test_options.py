"""A request's fields are the keywords of its function; messages name options in Python's words and are told in a command's."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch  # noqa: TID251
from world import requests

from trtopt.core.errors import UsageError
from trtopt.core.options import about, idle, keyed, option, options, spoken, taking, typed, without
from trtopt.core.progress import SILENT, Reporter

if TYPE_CHECKING:
    from trtopt.core.values import GivenProfile

    Runner = Any


@dataclass(frozen=True)
class Wanted:
    model: str = field(metadata=about(help="A model."))
    _: KW_ONLY
    batch: int = option(8, help="Samples at a time.")
    label: str | None = option(None)


@taking(Wanted)
def work(request: Wanted) -> Wanted:
    """Do it."""
    return request


def test_keywords_become_the_request() -> None:
    assert work("m.onnx", batch=3) == Wanted("m.onnx", batch=3)
    assert work(model="m.onnx").batch == 8
    with pytest.raises(FrozenInstanceError):
        work("m.onnx").batch = 2  # type: ignore[misc]


def test_the_function_shows_the_fields() -> None:
    parameters = inspect.signature(work).parameters
    assert list(parameters) == ["model", "batch", "label"]
    assert (parameters["batch"].default, parameters["batch"].annotation) == (8, "int")
    assert parameters["batch"].kind is inspect.Parameter.KEYWORD_ONLY
    said = pydoc.plain(pydoc.render_doc(work))
    assert "work(model: 'str', *, batch: 'int' = 8, label: 'str | None' = None) -> 'Wanted'" in said
    assert "Do it." in said


@pytest.mark.parametrize(
    "arguments, keywords, words",
    [
        (("m",), {"bach": 3}, r"work\(\): .*'bach'; did you mean 'batch'\?"),
        (("m",), {"zzz": 3}, r"work\(\): .*'zzz'$"),
        ((), {"batch": 3}, r"work\(\): missing a required argument: 'model'"),
        (("m", 3), {}, r"work\(\): too many positional arguments"),
        (("m",), {"model": "n"}, r"work\(\): multiple values for argument 'model'"),
    ],
)
def test_what_is_no_option_is_refused(arguments: tuple[str, ...], keywords: dict[str, int], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        work(*arguments, **keywords)  # type: ignore[arg-type]


def test_variants() -> None:
    given = Wanted("m", batch=3, label="x")
    assert without(given, "batch") == Wanted("m", label="x")
    assert replace(given, batch=4) == Wanted("m", batch=4, label="x")
    with pytest.raises(AssertionError):
        without(given, "model")  # has no default


FLAGS = {
    "min_snr": "--min-snr",
    "output": "-o/--output",
    "compare": "--compare/--no-compare",
    "int8": "--int8",
    "target": "--target",
    "model": "MODEL.onnx",  # an argument
}


@pytest.mark.parametrize(
    "text, said",
    [
        ("`min_snr=20`, or more", "--min-snr 20, or more"),
        ("add `target='a b'`", "add --target 'a b'"),
        ("add `target=['a', 'b c']`", "add --target a --target 'b c'"),
        ("add `target={'a': None, 'b': 'x'}`", "add --target a=None --target b=x"),
        ("give `target=NAME`", "give --target NAME"),
        ("give another `output=`", "give another -o/--output"),
        ("`output='x'`", "--output x"),
        ("drop `compare=False`", "drop --no-compare"),
        ("`compare=`", "--compare"),
        ("`int8=True` and `min_snr=`", "--int8 and --min-snr"),
        ("torch says: pass `strict=False`", "torch says: pass `strict=False`"),
        ("run `trtopt check m.onnx`", "run `trtopt check m.onnx`"),
        ("`model=` is gone", "MODEL.onnx is gone"),
        ("give `model='m.onnx'`", "give m.onnx"),
    ],
)
def test_options_are_told_as_flags(text: str, said: str) -> None:
    assert spoken(text, FLAGS) == said


def test_options_as_keys_of_a_file() -> None:
    text = "`shapes=` is open: `shapes='x:1x3'`, `best=True` or `compare=False`; `state=` and `x y` stay"
    told = "shapes is open: shapes = 'x:1x3', best = true or compare = false; `state=` and `x y` stay"
    assert keyed(text, ("state",)) == told


@dataclass(frozen=True)
class Plain:
    model: str | os.PathLike[str] = field(default="m", metadata=about(typed=Path))
    _: KW_ONLY
    calib: str | os.PathLike[str] | Table | None = field(default=None, metadata=about())
    run: str | os.PathLike[str] | Runner | None = field(default=None, metadata=about())
    files: Sequence[str | os.PathLike[str]] = ()
    count: int | None = option(None)
    share: str | float | None = option(None)
    least: float | None = option(None)
    on: bool = option(False)
    out: str | os.PathLike[str] | None = field(default=None, metadata=about(typed=Path))
    words: Sequence[str] = option(())
    sizes: Sequence[int] = option((1,), least=1)
    threads: int | None = option(None, least=1)
    kinds: Mapping[str, str] | Sequence[str] = option(())
    shapes: Sequence[str] | str | GivenProfile | Sequence[GivenProfile] = option(())  # noqa: RUF009
    reporter: Reporter = SILENT


@taking(Plain)
def plainly(request: Plain) -> Plain:
    """Do it."""
    return request


class Table:
    pass


class CalibrateResult:
    pass


def test_what_is_no_path_says_what_it_is_and_what_is_needed() -> None:
    assert plainly(Path("m"), calib=Table()).calib is not None and plainly("m", calib=None).calib is None
    for arguments, others, words in (
        ([None], {}, "`model=` is NoneType; a path is needed"),
        ([b"m"], {}, "`model=` is bytes; a path is needed"),
        ([torch.nn.ReLU()], {}, r"`model=` is ReLU; a path is needed: trtopt.export\(module"),
        (["m"], {"run": 3}, "`run=` is 3; a path or function is needed"),
        (
            ["m"],
            {"calib": CalibrateResult()},
            r"`calib=` is CalibrateResult; a path or Table is needed: its \.table is one",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            plainly(*arguments, **others)


EACH = "a mapping of inputs to their shapes"


@pytest.mark.parametrize(
    "given, said",
    [
        ({"count": "abc"}, "`count=` is 'abc'; a whole number is needed"),
        ({"count": [object()]}, "`count=` is list; a whole number is needed"),
        ({"share": b"1"}, "`share=` is bytes; a text or a number is needed"),
        ({"least": "abc"}, "`least=` is 'abc'; a number is needed"),
        ({"on": object()}, "`on=` is object; True or False is needed"),
        ({"on": None}, "`on=` is NoneType; True or False is needed"),
        ({"out": 3}, "`out=` is 3; a path is needed"),
        ({"words": 3}, "`words=` is 3; a list, each a text, is needed"),
        ({"sizes": "12"}, "`sizes=` is '12'; a list, each a whole number, is needed"),
        ({"sizes": {1, 2}}, "`sizes=` is set; a list, each a whole number, is needed"),
        ({"sizes": [4, 0]}, "`sizes=` is 0; at least 1 is needed"),
        ({"threads": -7}, "`threads=` is -7; at least 1 is needed"),
        ({"threads": 2**70}, f"`threads=` is {2**70}; a whole number is needed"),
        ({"words": iter(["a", 3])}, "`words=` is tuple; a list, each a text, is needed"),
        ({"kinds": {"y": 3}}, "`kinds=` is dict; a mapping of a text to a text or a list, each a text, is needed"),
        (
            {"shapes": 3.5},
            f"`shapes=` is 3.5; a text or {EACH} or a list, each a text, or a list, each {EACH}, is needed",
        ),
        ({"reporter": None}, "`reporter=` is NoneType; a trtopt.Reporter is needed"),
        ({"out": ""}, "`out=` is '': a path is needed"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(said)}$"):
        plainly(**given)


def test_numbers_of_other_libraries_are_numbers() -> None:
    given: dict[str, Any] = {"count": np.int64(3), "least": np.float32(2), "on": np.bool_(True), "share": 1}
    assert plainly(**given) == Plain(**given)
    assert plainly(least=3, on=True, sizes=[np.int32(1)], words=(word for word in "ab"), out=Path("a")).on  # type: ignore[arg-type]


def test_what_gives_its_items_once_becomes_a_list_of_them() -> None:
    assert plainly(sizes=iter([1, 2])).sizes == (1, 2)  # type: ignore[arg-type]
    assert plainly(shapes={"x": "1x3"}).shapes == {"x": "1x3"}  # type: ignore[dict-item]


class Opened:
    @typed
    def __init__(self, name: str, *, count: int = 1, other: Plain | None = None, **more: int) -> None:
        self.given = name, count, other, more


def test_functions_with_arguments_of_their_own_refuse_other_types_too() -> None:
    assert Opened("a", count=2, other=3, more=4).given == ("a", 2, 3, {"more": 4})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^`name=` is 3; a text is needed$"):
        Opened(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^`count=` is 'x'; a whole number is needed$"):
        Opened("a", count="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        Opened()  # type: ignore[call-arg]


def test_one_text_is_a_list_of_it() -> None:
    assert plainly("m", run=len).run is len
    assert plainly("m", words="conv1=fp32").words == ("conv1=fp32",)
    assert plainly("m", files=Path("a")).files == (Path("a"),)
    assert plainly("m", words=["a", "b"]).words == ["a", "b"]


@dataclass(frozen=True)
class Beside:
    data: Any = option(None)  # noqa: RUF009
    against: Sequence[str] = option(())
    verify: bool = option(True)
    limit: int = option(8, beside="`data='F.npz'`")
    source: str | None = option(None, beside="`against=['torch']` or `data='F.npz'`")
    tolerance: float = option(0.1, beside="`verify=True`")
    keep: bool = option(True, beside="`data='F.npz'`")


@taking(Beside)
def beside(request: Beside) -> Beside:
    return request


@pytest.mark.parametrize(
    "given, said",
    [
        ({"limit": 3}, "`limit=` has no effect without `data='F.npz'`: add that, or drop it"),
        (
            {"source": "m", "against": ["onnxruntime"]},
            "`source=` has no effect without `against=['torch']` or `data='F.npz'`: add one of them, or",
        ),
        ({"tolerance": 0.2, "verify": False}, "`tolerance=` has no effect without `verify=True`: add that, or drop it"),
        ({"keep": False}, "`keep=False` has no effect without"),
    ],
)
def test_an_option_that_has_no_effect_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        beside(**given)


def test_an_option_beside_what_it_belongs_to_is_taken() -> None:
    beside(limit=8)  # as if it weren't given
    beside(limit=3, data=np.zeros(3), source="m", keep=False)
    beside(source="m", against=["onnxruntime", "torch"], tolerance=0.2)


@pytest.mark.parametrize("request_", requests(), ids=lambda request: request.__name__)
def test_what_an_option_belongs_to_is_an_option(request_: type[Any]) -> None:
    entries = options(request_)
    plain = request_(**{name: "m" for name, (item, _) in entries.items() if item.default is MISSING})
    assert idle(plain) == {}  # defaults need nothing beside them
    for name, (item, said) in entries.items():
        others = re.findall(r"`(\w+)=([^`]*)`", said.beside)
        assert bool(said.beside) == bool(others), name
        given = replace(plain, **{name: not item.default if isinstance(item.default, bool) else ["3"]})
        for other, wanted in others:
            value = ast.literal_eval(wanted) if wanted.startswith("[") or wanted == "True" else "d"
            assert name not in idle(replace(given, **{other: value})), (name, other)

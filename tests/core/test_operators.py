"""Custom operators: what is registered, from which files, and what those may do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from custom import OPERATORS
from graphs import values

from trtopt.core import operators
from trtopt.core.errors import UsageError
from trtopt.core.operators import digest, known, load, load_reference, operator, plugins

pytestmark = pytest.mark.usefixtures("no_operators")


def test_a_file_registers_the_operators_of_a_request(operators_file: Path) -> None:
    x = values(2, 3)
    before, modules = list(sys.path), set(sys.modules)
    load(SimpleNamespace(operators=str(operators_file)))
    found = known("acme", "Swishy")
    assert found is not None and known("other", "Swishy") is None
    (result,) = found([x, np.float32(2)], {"scale": 3.0, "plugin_version": "1"})
    assert np.allclose(result, 3 * x / (1 + np.exp(-2 * x)))
    assert found.shapes_of([("n", 3), ()], {"scale": 3.0}) == (("n", 3),)
    assert sys.path == before and len(set(sys.modules) - modules) <= 1


def test_a_name_without_a_domain_is_known_in_any() -> None:
    operator("Twice")(lambda x: 2 * x)
    assert known("a", "Twice") is known("b", "Twice") is not None
    for name in ("::Twice", "a::", ""):
        with pytest.raises(UsageError, match="domain::Operator"):
            operator(name)
    with pytest.raises(UsageError, match="'int8' among its types; allowed: fp32, fp16, bf16"):
        operator("Twice", types=("int8",))


def test_a_changed_file_is_loaded_again_and_has_another_digest(operators_file: Path) -> None:
    load_reference(operators_file)
    first = known("acme", "Swishy")
    load_reference(operators_file)
    assert known("acme", "Swishy") is first and first is not None
    operators_file.write_text(OPERATORS.replace("scale * x", "2 * scale * x"))
    load_reference(operators_file)
    second = known("acme", "Swishy")
    assert second is not None and digest([second]) != digest([first]) and digest([]) == ""


def test_faults_of_the_users_own_code_are_told_with_their_place(operators_file: Path) -> None:
    operators_file.write_text("import nowhere_to_be_found\n")
    for _ in range(2):  # not taken for loaded
        with pytest.raises(UsageError, match=r"ops.py can't be imported: ModuleNotFoundError.*line 1"):
            load_reference(operators_file)
    operators_file.write_text("raise SystemExit(3)")
    with pytest.raises(UsageError, match="SystemExit"):
        load_reference(operators_file)
    with pytest.raises(UsageError, match="doesn't exist"):
        load_reference(operators_file.parent / "absent.py")
    with pytest.raises(UsageError, match=r"has to end in \.py"):
        load_reference(Path(__file__).parents[2] / "pyproject.toml")

    @operator("Broken", shapes=lambda x: [(x[0] // 2,)])
    def broken(x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        raise ValueError("not this one")

    found = known("", "Broken")
    assert found is not None
    with pytest.raises(
        UsageError, match=r"the reference of Broken failed on \(2, 3\): ValueError: not this one \(.*line"
    ):
        found([values(2, 3)], {})
    with pytest.raises(UsageError, match=r"Broken failed on \('n',\): TypeError"):
        found.shapes_of([("n",)], {})


def test_plugins_are_those_that_the_user_named_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (tmp_path / name for name in ("a.so", "b.so"))
    for path in (first, second):
        path.write_bytes(b"")
    monkeypatch.setenv(operators.PLUGINS, str(second))
    load(SimpleNamespace(plugins=[str(first)]))
    assert plugins() == (second.resolve(), first.resolve())
    load(SimpleNamespace(plugins=True))  # a switch of that name
    with pytest.raises(UsageError, match=r"plugin .*c.so doesn't exist"):
        load(SimpleNamespace(plugins=str(tmp_path / "c.so")))
    monkeypatch.setenv(operators.PLUGINS, str(tmp_path / "d.so"))
    with pytest.raises(UsageError, match="TRTOPT_PLUGINS"):
        plugins()


def test_what_a_file_imports_and_reads_is_part_of_the_digest(tmp_path: Path) -> None:
    """In another process, that is: in one a file is loaded once."""
    seen, file = set[str](), tmp_path / "ops.py"
    file.write_text(
        "import json, pathlib, trtopt\nfrom helper import twice\n"
        "K = json.loads(pathlib.Path(__file__).with_name('k').read_text())\n"
        "@trtopt.operator('acme::Sw')\ndef sw(x):\n    return K * twice(x)\n"
    )
    for number, (helper, constant) in enumerate((("2 * x", "1"), ("3 * x", "1"), ("3 * x", "5"), ("3 * x", "5"))):
        (tmp_path / "helper.py").write_text(f"def twice(x):\n    return {helper}\n# {helper}, {number * 0}\n")
        (tmp_path / "k").write_text(constant)
        operators._references.clear()
        load_reference(file)
        found = known("acme", "Sw")
        assert found is not None
        seen.add(digest([found]))
    assert len(seen) == 3


def test_what_cannot_be_registered_is_said() -> None:
    with pytest.raises(UsageError, match="'fp32' among its outputs; allowed: float32"):
        operator("Twice", outputs=("fp32",))
    with pytest.raises(UsageError, match="takes the operator's name"):
        operator(lambda x: x)  # type: ignore[arg-type]
    operator("One", types="fp16", outputs="int64")(lambda x: x)
    found = known("a", "One")
    assert found is not None and (found.types, found.outputs) == (("fp16",), ("int64",))


@pytest.mark.parametrize("result", [np.ones((2, 1), np.float32), 1.0, None])
def test_a_result_is_held_against_the_rule_for_shapes(result: object) -> None:
    operator("Cut", shapes=lambda x: [x])(lambda x: result)
    operator("Odd", shapes=lambda x, y: [x])(lambda x: x)
    cut, odd = known("a", "Cut"), known("a", "Odd")
    assert cut is not None and odd is not None
    with pytest.raises(UsageError, match=r"reference of Cut gives .* where its rule for shapes says \(2, 3\)"):
        cut([values(2, 3)], {})
    with pytest.raises(UsageError, match="the rule for shapes of Odd failed"):
        odd.shapes_of([(2, 3)], {})

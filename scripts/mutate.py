"""Change one statement of a module at a time and say which changes its own tests don't notice.

    .venv-test/bin/python scripts/mutate.py trtopt/graph/guard.py tests/graph/test_guard.py --count 40 --seed 1

Statements are drawn at random (docstrings, imports, assertions and annotations left out), one change each: an operator
swapped, a constant moved, a condition negated, a statement, keyword argument or raise removed, a returned value replaced. Each
changed module lies in a copy of the checkout, so that the checkout itself stays as it is; a run of the tests ends at the
first failure. Exit status 1: fewer than `--least` of the changes were noticed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.LShift: ast.RShift,
}  # fmt: skip
SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete)
HEADS = (ast.If, ast.While, ast.For, ast.With)


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that may be changed; of a compound one, its head."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom)):
            continue  # docstrings; a context manager without its yield fails in any test
        if isinstance(node, SIMPLE + HEADS) or (isinstance(node, ast.AnnAssign) and node.value is not None):
            yield node


def parts(statement: ast.stmt) -> list[ast.AST]:
    """The expressions of a statement, without bodies and annotations."""
    heads = [
        child
        for field, value in ast.iter_fields(statement)
        if field not in ("body", "orelse", "annotation", "targets", "target")
        for child in (value if isinstance(value, list) else [value])
        if isinstance(child, ast.AST)
    ]
    return [node for head in heads for node in ast.walk(head)]


def changes(statement: ast.stmt) -> list[tuple[str, ast.AST, ast.AST | None]]:
    """Possible changes: what it is, the node to replace, and what with (None: `pass` in the statement's place)."""
    found: list[tuple[str, ast.AST, ast.AST | None]] = []
    for node in parts(statement):
        swapped = copy.deepcopy(node)
        if isinstance(swapped, (ast.BinOp, ast.BoolOp)) and type(swapped.op) in SWAPS:
            swapped.op = SWAPS[type(swapped.op)]()  # type: ignore[assignment]
            found.append(("operator", node, swapped))
        elif isinstance(swapped, ast.Compare) and type(swapped.ops[0]) in SWAPS:
            swapped.ops[0] = SWAPS[type(swapped.ops[0])]()  # type: ignore[call-overload]
            found.append(("comparison", node, swapped))
        elif isinstance(swapped, ast.Constant) and isinstance(swapped.value, bool):
            found.append(("constant", node, ast.Constant(not swapped.value)))
        elif isinstance(swapped, ast.Constant) and isinstance(swapped.value, (int, float)):
            moved = swapped.value + 1 if isinstance(swapped.value, int) else swapped.value * 2
            found.append(("constant", node, ast.Constant(moved)))
        elif isinstance(swapped, ast.Call) and swapped.keywords:
            for place in range(len(swapped.keywords)):
                fewer = copy.deepcopy(swapped)
                del fewer.keywords[place]
                found.append(("keyword", node, fewer))
    if isinstance(statement, (ast.If, ast.While)):
        found.append(("negated", statement.test, ast.UnaryOp(ast.Not(), copy.deepcopy(statement.test))))
    if isinstance(statement, ast.Return) and statement.value is not None and ast.unparse(statement.value) != "None":
        found.append(("returns None", statement.value, ast.Constant(None)))
    if isinstance(statement, (ast.AugAssign, ast.Expr, ast.Raise, ast.Delete)):
        found.append(("removed", statement, None))
    return found


def replaced(source: str, node: ast.AST, other: ast.AST | None) -> str:
    """The source with another node's text in the place of this one's."""
    lines = source.encode().splitlines(keepends=True)
    ends = [(node.lineno - 1, node.col_offset), (node.end_lineno - 1, node.end_col_offset)]  # type: ignore[attr-defined]
    start, end = (sum(map(len, lines[:line])) + column for line, column in ends)
    if other is None:
        text = "pass"
    else:
        text = ast.unparse(other) if isinstance(other, (ast.Constant, ast.Call)) else f"({ast.unparse(other)})"
    content = source.encode()
    return (content[:start] + text.encode() + content[end:]).decode()


def mutants(path: Path, count: int, seed: int) -> Iterator[tuple[int, str, str]]:
    """Line, what is changed, and the changed source; a statement once, in random order."""
    source, draw = path.read_text(), random.Random(seed)
    nodes = list(statements(ast.parse(source)))
    draw.shuffle(nodes)
    for node in nodes:
        if not (options := changes(node)):
            continue
        kind, old, new = draw.choice(options)
        text = replaced(source, old, new)
        try:
            compile(text, path.name, "exec")
        except SyntaxError:  # within an f-string of Python 3.11 and older, places aren't those of the file
            continue
        if ast.dump(ast.parse(text)) == ast.dump(ast.parse(source)):
            continue
        before = ast.get_source_segment(source, old) or ""
        after = "pass" if new is None else ast.unparse(new)
        yield node.lineno, f"{kind}: {' '.join(before.split())[:90]} → {' '.join(after.split())[:90]}", text
        count -= 1
        if not count:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+", help="files or pytest's arguments")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one run; longer counts as noticed")
    parser.add_argument("--least", type=float, default=0.9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("trtopt", "tests", "scripts", "docs", "benchmarks", "calibration", "models"):
            shutil.copytree(name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        for name in ("pyproject.toml", "README.md", "requirements.lock", "samples.lock"):
            shutil.copy(name, folder)
        target = Path(folder, given.module)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *given.tests]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}

        def passes() -> bool:
            try:
                run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=given.timeout)
            except subprocess.TimeoutExpired:
                return False
            return run.returncode == 0

        if not passes():
            print("the tests fail on the module as it is, or take too long", file=sys.stderr)
            return 2
        survivors, tried, started = [], 0, time.monotonic()
        for line, what, text in mutants(given.module, given.count, given.seed):
            target.write_text(text)
            tried += 1
            if passes():
                survivors.append((line, what))
                print(f"survived: {given.module}:{line} {what}", flush=True)
    noticed = 1 - len(survivors) / max(1, tried)
    seconds = time.monotonic() - started
    print(
        f"{given.module}: {tried - len(survivors)} of {tried} noticed, {noticed:.0%} ({seconds:.0f} s, seed {given.seed})"
    )
    return int(noticed < given.least)


if __name__ == "__main__":
    sys.exit(main())

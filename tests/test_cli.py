"""The command line is the API: same names, same defaults; lean to start, one JSON object, examples in the help."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner
from world import Terminal, World

import trtopt
from trtopt import cli
from trtopt.cli import application, commands
from trtopt.core.errors import UnsupportedRequest
from trtopt.core.progress import Reporter
from trtopt.linting.checker import CheckReport
from trtopt.linting.rules import Finding

GROUPS = (cli.app, commands.jobs, commands.deploy, commands.store)
REGISTERED = [command for group in GROUPS for command in group.registered_commands]
COMMANDS = {command.callback.__name__: command.callback for command in REGISTERED if command.callback}
# What is typed for the others is their name.
TYPED = {
    "run_jobs": ["jobs", "run"],
    "show_jobs": ["jobs", "show"],
    "deploy_triton": ["deploy", "triton"],
    "list_store": ["store", "list"],
    "prune_store": ["store", "prune"],
}
# API parameters that the command line gives in its own way.
ELSEWHERE = {"reporter"}
ONLY_CLI = {"json_output"}
INSTEAD = {
    "verify": ({"batches"}, set()),
    "report": ({"results"}, set()),  # the command reads what lies beside the engine
    "tune": ({"int8", "fp16", "fp8", "best", "calibrator", "save_cache"}, set()),  # of `build`; tune has chosen
}
IMAGE_OPTIONS = {"size", "resize", "layout", "channels", "scale", "mean", "std"}  # keys of `preprocess`


def _parameters(function: Any) -> dict[str, Any]:
    return {name: item.default for name, item in inspect.signature(function).parameters.items()}


def test_every_public_function_has_its_command() -> None:
    functions = {name for name in trtopt.__all__ if inspect.isfunction(getattr(trtopt, name))}
    assert set(COMMANDS) == functions - {"load_manifest", "operator"}
    assert len(COMMANDS) == 26


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_names_and_defaults_are_those_of_the_api(name: str) -> None:
    command, function = _parameters(COMMANDS[name]), _parameters(getattr(trtopt, name))
    only_api, only_cli = INSTEAD.get(name, (set(), set()))
    assert set(command) - ONLY_CLI - only_cli - IMAGE_OPTIONS == set(function) - ELSEWHERE - only_api
    required = {inspect.Parameter.empty, "no default"}
    for parameter in set(command) & set(function):
        mine, other = command[parameter], function[parameter]
        if other == () and mine is None:  # a repeatable option that wasn't given
            continue
        if parameter == "output" and name == "calibrate":  # the API can keep the table in memory
            continue
        assert mine == other or {mine, other} <= required, parameter


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_empty_path_is_refused_by_name(name: str, world: World) -> None:
    """Try every path that the command takes; nothing is written, as it were into this folder."""
    command: Any = typer.main.get_command(cli.app)
    for word in (words := TYPED.get(name, [name])):
        command = command.commands[word]
    kinds = {item.name: item.annotation.__origin__ for item in inspect.signature(COMMANDS[name]).parameters.values()}
    for item in command.params:
        kind = kinds.get(item.name)
        if Path not in (kind, *get_args(kind)):
            continue
        typed: list[object] = []  # with what else the command can't do without, each an argument or an option
        for other in command.params:
            if other is item or other.required:
                typed += [*[form for form in other.opts if form.startswith("--")], "" if other is item else world.model]
        called = "/".join(item.opts) if item.opts[0].startswith("-") else item.metavar or item.name.upper()
        assert world.refused(*words, *typed) == f"{called} is '': a path is needed", typed


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_shows_an_example(name: str) -> None:
    typed = TYPED.get(name, [name])
    result = CliRunner().invoke(cli.app, [*typed, "--help"])
    assert result.exit_code == 0
    assert f"Example: trtopt {' '.join(typed)}" in " ".join(result.output.split())


NAMED = re.compile(r"`([a-z][a-z0-9_]*)=[^`]*`")
FLAG = re.compile(r"(?<![\w-])--[a-z]")
NO_FLAG = {"remainder", "contexts", "queue"}  # of the builder's own options; of Session, and of no command


@functools.cache
def _texts(path: Path) -> list[str]:
    """The string literals of a module but its docstrings, f-strings with "{}" for what is computed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(item.value) for item in ast.walk(tree) if isinstance(item, ast.Expr)}
    parts = {id(part) for item in ast.walk(tree) if isinstance(item, ast.JoinedStr) for part in item.values}
    found = []
    for item in ast.walk(tree):
        if isinstance(item, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in item.values))
        elif isinstance(item, ast.Constant) and isinstance(item.value, str) and not {id(item)} & (docs | parts):
            found.append(item.value)
    return found


ROOT = Path(trtopt.__file__).parent
# Not messages: arguments of other programs, commands to be typed.
ARGUMENTS = {"core.options", "core.shapes", "core.removed", "core.shared_options", "workflow"}
ARGUMENTS |= {"diagnosis.doctor", "diagnosis.migration", "diagnosis.report", "frontend.proposal", "serving.server"}
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}
MESSAGES = [  # but of the command line, and what its help says
    name for name in MODULES if name not in ARGUMENTS and not name.startswith("cli.") and not name.endswith("request")
]


@pytest.mark.parametrize("module", MESSAGES)
def test_messages_name_options_that_there_are_and_no_flags(module: str) -> None:
    for text in _texts(MODULES[module]):
        named = {found[1] for found in NAMED.finditer(text)} - NO_FLAG
        assert named <= set(application.FLAGS), text
        flags = [found.start() for found in FLAG.finditer(text)]
        assert all(
            any(program in text[:place] for program in ("trtopt ", "ray start", "docker run")) for place in flags
        ), text


def test_options_in_messages_are_told_as_flags(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, reporter: Reporter, **__: Any) -> None:
        reporter.warn("no `shapes=` given")
        reporter.note("`backend='rtx'` has `zzz=`")
        raise UnsupportedRequest("`compare=False`", ["give another `output=`"])

    monkeypatch.setattr(trtopt, "check", refuse, raising=False)
    found = world.run("check", "m.onnx", "--json")
    assert found.err == (
        "warning: no --shapes given\n--backend rtx has `zzz=`\nerror: --no-compare:\n  give another -o/--output\n"
    )
    assert json.loads(found.out)["error"] == {
        "type": "UnsupportedRequest",
        "message": "--no-compare:\n  give another -o/--output",
        "options": {"compare": "False", "output": ""},  # as the API names them
    }


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_options_in_results_are_told_as_flags(world: World, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    finding = Finding("warning", "x", "", "", "odd", "give `shapes=`, or `precision_override=['a=fp32']`")
    monkeypatch.setattr(trtopt, "check", lambda *_, **__: CheckReport("m.onnx", (finding,)), raising=False)
    assert "give --shapes, or --precision-override a=fp32" in " ".join(world.run("check", "m.onnx", *more).out.split())


def test_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(cli.app, ["version", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["trtopt"] == trtopt.__version__
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"trtopt {trtopt.__version__}\n"


def test_every_exit_status_is_in_the_help() -> None:
    errors = [getattr(trtopt, name) for name in trtopt.__all__]
    due = {
        str(error.exit_code) for error in errors if isinstance(error, type) and issubclass(error, trtopt.TrtoptError)
    }
    assert due | {"0", "70"} == set(application.EXIT_STATUSES)  # test_kills.py has those of signals
    said = " ".join(CliRunner().invoke(cli.app, ["--help"]).output.split())
    assert all(f"{status} {' '.join(meaning.split())}" in said for status, meaning in application.EXIT_STATUSES.items())


def raising(error: BaseException) -> Callable[..., None]:
    def work(*_: Any, **__: Any) -> None:
        raise error

    return work


NO_GRAPHS = ModuleNotFoundError("No module named 'onnx_ir'", name="onnx_ir")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (RuntimeError("the sky fell"), 70, "internal error, please report it: RuntimeError: the sky fell"),
        (MemoryError(), 1, "error: there isn't enough memory: free some"),
        (NO_GRAPHS, 1, "onnx_ir, which isn't installed: pip install"),
        (KeyboardInterrupt(), 130, "stopped"),  # Ctrl-C
    ],
)
def test_an_error_is_one_line_without_a_traceback(
    world: World, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    monkeypatch.setattr(trtopt, "version", raising(error), raising=False)
    found = world.run("version")
    assert found.status == status and said in found.err and "Traceback" not in found.err


@pytest.mark.parametrize("work", ["import trtopt; trtopt.__all__", "from trtopt import cli; cli.main()"])
def test_starting_imports_nothing_heavy(work: str) -> None:
    heavy = ["torch", "onnxruntime", "tensorrt", "tensorrt_rtx", "cv2", "onnx", "numpy", "msgspec", "rich.table"]
    told = f"atexit.register(lambda: print([name for name in {heavy} if name in sys.modules], file=sys.stderr))"
    code = f"import sys, atexit\n{told}\nsys.argv = ['trtopt', '--help']\n{work}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("[]"), done.stderr


def test_verbose_shows_tracebacks_on_stderr_wherever_it_stands(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtopt, "check", raising(RuntimeError("the sky fell")), raising=False)
    words = ["check", "m.onnx", "--json"]
    for arguments, shown in (
        (words, False),
        ([*words, "-v"], True),
        ([*words, "--verbose"], True),
        (["-v", *words], True),
    ):
        monkeypatch.setenv("TRTOPT_DEBUG", "")
        found = world.run(*arguments)
        assert ("Traceback" in found.err) is shown and list(json.loads(found.out)) == ["error"]


def test_an_option_that_ends_the_line_without_its_value_is_named(world: World) -> None:
    done = world.run("build", "m.onnx", "-o", "m.engine", "--sparsity")
    assert done.status == 2 and done.err == "error: --sparsity requires an argument: type --sparsity off|keep|prune\n"


@pytest.mark.parametrize("arguments", [["-q", "check", "m"], ["check", "-q", "m"], ["check", "m", "--quiet"]])
def test_quiet_stands_before_or_after_the_command_and_leaves_warnings(
    world: World, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    def said(reporter: Reporter, **_: Any) -> CheckReport:
        reporter.note("a note")
        reporter.warn("a warning")
        with reporter.phase("a phase"):
            return CheckReport("m.onnx", ())

    monkeypatch.setattr(trtopt, "check", said, raising=False)
    assert world.run(*arguments).err == "warning: a warning\n"
    assert "a note" in world.run("check", "m.onnx").err  # it isn't kept for the next


def test_a_shell_can_complete_options() -> None:
    variables = {"_TRTOPT_COMPLETE": "complete_bash", "COMP_WORDS": "trtopt build --int", "COMP_CWORD": "2"}
    command = [sys.executable, "-m", "trtopt"]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    assert done.stdout == "--int8\n--int4\n"


TABLES = {
    "figures": (
        ("runner", "batch", "GPU ms", "host ms", "p50 ms", "p90 ms", "p99 ms", "samples/s", "× time"),
        ("onnxruntime", "32", "0.2345", "0.2456", "123.4", "125.1", "130.2", "61234", "240.90"),
    ),
    "names": (("quantized alone", "read by", "dB"), (30 * "weights", "node_Conv_882, node_Conv_883", "16.9")),
}


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_the_terminal_and_cut_nothing(monkeypatch: pytest.MonkeyPatch, name: str, width: int) -> None:
    for variable, value in {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    columns, row = TABLES[name]
    application.print_table("m.engine", columns, [row])
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.getvalue())  # NO_COLOR
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    least = 9 * 10 if name == "figures" else 0  # figures are never broken
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= max(width, least)
    assert all(cell in shown for cell in row if len(cell) <= application.SHORT and " " not in cell)
    characters = re.compile(r"[a-z0-9]")
    assert len(characters.findall(shown)) >= sum(len(characters.findall(cell)) for cell in row)


def test_help_fits_a_terminal_and_cuts_no_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = CliRunner().invoke(cli.app, ["--help"]).output
    assert max(map(len, said.splitlines())) <= 80 and "..." not in said.partition("\n\n")[2]
    grouped = [name for names in application.GROUPS.values() for name in names]
    known = typer.main.get_command(cli.app).list_commands(None)  # type: ignore[attr-defined]
    assert sorted(grouped) == sorted(known)
    assert re.findall(r"^  ([a-z]+)  ", said.partition("Prepare")[2], re.M) == grouped


@pytest.mark.parametrize("name", ["build", "tune", "calibrate"])
def test_help_begins_with_an_example_and_the_usual_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = CliRunner().invoke(cli.app, [name, "--help"]).output
    usual, others = said.partition("\nUsual:\n")[2].partition("\n\n")[::2]
    assert "Example: trtopt" in said.partition("Arguments:")[0]
    assert len(re.findall(r"^  (-o, )?--", usual, re.M)) <= 7 and "--images" in usual and "--preprocess" in usual
    headings = re.findall(r"^([A-Z][a-z]+):$", others, re.M)
    assert {"Input", "Calibration", "Output"} <= set(headings) and len(headings) == len(set(headings))
    if name != "calibrate":
        assert {"Precision", "Limits", "Shapes", "Build"} <= set(headings)


@pytest.mark.parametrize("verbose", [False, True])
def test_check_has_a_line_for_each_finding_and_a_fix_under_it(verbose: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTOPT_DEBUG", "")  # -v sets it
    findings = (
        Finding("error", "bad-op", "n", "Conv", "it can't", "use another"),
        Finding("warning", "odd", "", "", "it may not"),
        Finding("info", "int64-input", "x", "", "it is int64", "feed it"),
        Finding("info", "int64-input", "y", "", "it is int64", "feed it"),
    )
    monkeypatch.setattr(trtopt, "check", lambda *_, **__: CheckReport("m.onnx", findings), raising=False)
    lines = CliRunner().invoke(cli.app, ["check", "m.onnx", *["-v"] * verbose]).stdout.splitlines()
    assert lines[:3] == ["error bad-op n (Conv): it can't", "  fix: use another", "warning odd: it may not"]
    infos = ["info int64-input x: it is int64", "  note: feed it", "info int64-input y: it is int64", "  note: feed it"]
    assert lines[3:-1] == (infos if verbose else ["2 infos: trtopt check m.onnx -v shows them"])
    assert lines[-1].startswith("m.onnx: 1 error, 1 warning, 2 info")


def test_names_take_commas_and_arguments_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(trtopt, "export", lambda *_, **options: given.update(options), raising=False)
    names = ["--output-names", "p", "--output-names", "q, r"]
    arguments = ["--factory-arg", "width=8", "--factory-arg", "weights_backbone=None"]
    CliRunner().invoke(cli.app, ["export", "my_model:Net", "-o", "m.onnx", *names, *arguments])
    assert given["output_names"] == ("p", "q", "r")
    assert given["factory_arg"] == {"width": 8, "weights_backbone": None}

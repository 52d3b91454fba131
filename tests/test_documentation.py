"""Commands of the pages can be typed: each command and option in them exists, as does each script and what is imported."""

from __future__ import annotations

import os
import re

import pytest
from documented import PAGES, ROOT, WENT, commands, complaint, options, parse, spans, text_of, typed
from typer.testing import CliRunner

import trtopt
from trtopt.cli import app
from trtopt.core.values import METHODS
from trtopt.trt.facts import GENERATIONS

LISTED = ("docs/", "models/", "calibration/", "CHANGELOG", "CONTRIBUTING")
FOREIGN = ("docs/manual/from-", "CHANGELOG.md")  # pages that name the options of others
SKETCHES = ("docs/architecture.md",)  # whose Python are signatures
OTHERS = {"--backend-config", "--leak-check"}  # tritonserver's, compute-sanitizer's


@pytest.mark.parametrize("page", PAGES)
def test_every_command_parses(page: str) -> None:
    assert [said for said in map(complaint, commands(text_of(page))) if said] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_is_to_be_typed_is_complete(page: str) -> None:
    for command in typed(text_of(page)):
        if "…" not in command and "..." not in command:
            parse(command)


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(FOREIGN)])
def test_every_option_that_is_named_exists(page: str) -> None:
    text = re.sub(r"^\| `--[^|]*\|", "|", text_of(page).replace("\\|", " "), flags=re.M)  # of trtexec, in its table
    folders = (ROOT / "scripts", ROOT / "benchmarks")
    scripts = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    scripts += (ROOT / "tests").rglob("conftest.py")
    theirs = re.findall(r"--[a-z][\w-]*", "".join(path.read_text(encoding="utf-8") for path in scripts))
    known = options() | OTHERS | set(theirs)
    alone = [span for span in spans(text) if span.startswith("--")]
    unknown = [name for span in alone for name in re.findall(r"(?:^|\s)(--[a-z][\w-]*)", span) if name not in known]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES)
def test_every_script_that_is_named_exists_and_has_its_options(page: str) -> None:
    wrong = []
    for line in re.findall(r"(?:scripts|benchmarks)/[\w.]+[^`#\n]*", text_of(page).replace("\\\n", " ")):
        script, *words = line.split()
        path = ROOT / script.rstrip(".,:;)")
        if not path.exists():
            wrong.append(line)
            continue
        beside = path.parent / f"{path.name}.py"
        source = "".join(item.read_text(encoding="utf-8") for item in (path, beside) if item.is_file())
        wrong += [f"{line}: {word}" for word in words if re.fullmatch(r"--[a-z][\w-]+", word) and word not in source]
    assert wrong == []


@pytest.mark.parametrize("folder", ["scripts", "benchmarks"])
def test_every_script_has_a_line(folder: str) -> None:
    told = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / folder / "README.md").read_text(encoding="utf-8"), re.M))
    there = {path.name for path in (ROOT / folder).iterdir() if path.is_file()}
    assert told == there - {"README.md"} and len(there) <= 25


@pytest.mark.parametrize("page", [page for page in PAGES if page not in SKETCHES])
def test_python_in_pages_compiles_and_names_what_there_is(page: str) -> None:
    for block in re.findall(r"^```python\b[^\n]*\n(.*?)^```$", text_of(page), re.S | re.M):
        compile(block, page, "exec")
        names = re.findall(r"\btrtopt\.(\w+)", re.sub(r"^\s*(?:from|import) .*", "", block, flags=re.M))
        names += [name for line in re.findall(r"^from trtopt import (.*)", block, re.M) for name in line.split(", ")]
        assert [name for name in names if not hasattr(trtopt, name)] == []


# What pages list, and where they lead ---------------------------------------------------------------------------------------


def test_what_replaces_the_flags_of_trtexec_exists() -> None:
    rows = re.findall(
        r"^\| `--.*? \| (.*) \|$", text_of("docs/manual/from-trtexec.md").split("## The usual options")[1], re.M
    )
    assert len(rows) >= 12
    for row in rows:
        command = (re.findall(r"trtopt (\w+)", row) or ["build"])[0]
        told = CliRunner().invoke(app, [command, "--help"], terminal_width=200).output
        assert [option for option in re.findall(r"--[a-z][a-z0-9-]*", row) if option not in told] == []


def test_every_extra_is_in_the_table() -> None:
    options = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = re.findall(r"^([a-z0-9-]+) = \[", options, re.M)
    named = " ".join(re.findall(r"^\| (`.*?) \|", text_of("docs/install.md"), re.M))
    assert {*extras} == {*re.findall(r"`([\w-]+)`", named), "dev"}


@pytest.mark.parametrize("family", GENERATIONS)
def test_every_generation_has_its_extras_and_its_column(family: str) -> None:
    facts = GENERATIONS[family]
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in facts.extras.values())
    name = ".".join(map(str, facts.first)) or "RTX"
    header = text_of("README.md").split("## Generations")[1].split("\n")[2]
    assert re.search(rf"\| {re.escape(name)}\b", header), header


@pytest.mark.parametrize("page", ["docs/commands.md", "docs/manual/from-torch2trt.md", "CHANGELOG.md"])
def test_every_threshold_method_is_named(page: str) -> None:
    assert [method for method in METHODS if not re.search(rf"\b{method}\b", text_of(page))] == []


def test_every_command_is_in_the_table() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == set(re.findall(r"^\| `(\w+)` \| ", text_of("docs/commands.md"), re.M))


def test_the_two_commands_exist() -> None:
    scripts = re.findall(r"^(scripts/\w+)", text_of("README.md").split("## Two commands")[1].split("\n## ")[0], re.M)
    assert scripts == ["scripts/quickstart", "scripts/test"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_page_is_listed_and_in_the_navigation() -> None:
    links = re.findall(r"\]\(([^)#]+)", text_of("docs/README.md"))
    listed = {(ROOT / "docs" / link).resolve().relative_to(ROOT).as_posix() for link in links}
    pages = {page for page in (*PAGES, WENT) if page.startswith(LISTED)} - {"docs/README.md"}
    assert {page for page in pages if not page.startswith(("docs/results/", "docs/decisions/"))} <= listed
    navigation = text_of("docs/manual/zensical.toml")
    assert [page for page in sorted(pages) if f'"{page}"' not in navigation] == []


def test_the_readme_is_read_in_two_minutes() -> None:
    lengths = {"README.md": 130, "docs/architecture.md": 200, "CHANGELOG.md": 60}
    assert [page for page, most in lengths.items() if len(text_of(page).splitlines()) > most] == []


def _anchors(page: str) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", text).lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", [*PAGES, WENT])
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text_of(page))
    places = [((ROOT / page).parent / link if link else ROOT / page, anchor) for link, anchor in links]
    assert [path for path, _ in places if not path.exists()] == []
    assert [anchor for path, anchor in places if anchor and anchor not in _anchors(str(path))] == []
    assert page != "README.md" or len(links) >= 5

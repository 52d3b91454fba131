"""The manual as a site: pages of the checkout as they are, and what is made from the command line and the docstrings.

A block of the language `bash migrate` holds commands of another tool; what `trtopt doctor --migrate` says of them is put
beside. `<!-- every option of trtexec -->` becomes a table of all that it knows, `<!-- every removed name -->` one of
docs/manual/removed.toml.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

import trtopt
from trtopt import cli
from trtopt.cli.application import EXIT_STATUSES
from trtopt.core.documents import read_toml
from trtopt.core.errors import TrtoptError
from trtopt.diagnosis.migration import OPTIONS, Migration, migrated

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "models/README.md", "calibration/README.md")
SAMPLES = {  # values for the table of trtexec's options
    **dict.fromkeys(("minShapes", "optShapes", "maxShapes", "shapes"), "x:8x3x224x224"),
    **dict.fromkeys(("inputIOFormats", "outputIOFormats"), "fp16:chw"),
    **dict.fromkeys(("infStreams", "streams", "builderOptimizationLevel", "maxAuxStreams", "device"), "2"),
    **dict.fromkeys(("exportOutput", "dumpOutput"), "OUT.json"),
    "calib": "OLD.cache",
    "hardwareCompatibilityLevel": "ampere+",
    "iterations": "100",
    "layerPrecisions": "conv1:fp32",
    "loadInputs": "x:X.raw",
    "memPoolSize": "workspace:2048",
    "sparsity": "enable",
    "timingCacheFile": "F.cache",
    "workspace": "2048",
}

SILENT = {  # what a command shows by what it leaves out
    "profile": "nothing: `--shapes` with an input that it had before begins another profile",
    "skipInference": "nothing: `trtopt build` only builds",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="folder to write (default: site/)")
    output = parser.parse_args().output.absolute()
    if sys.version_info < (3, 11):
        sys.exit(
            "scripts/manual: Zensical and mkdocstrings need Python 3.11 or newer: PYTHON=python3.12 scripts/manual"
        )
    with tempfile.TemporaryDirectory(prefix="trtopt-manual-") as made:
        folder = Path(made)
        lay_out(folder)
        site = build(folder)
        shutil.rmtree(output, ignore_errors=True)
        shutil.move(site, output)
    print(output / "index.html")


def build(folder: Path) -> Path:
    """The site of the folder's pages; a link or a reference that leads nowhere ends the process."""
    modules = os.pathsep.join((str(ROOT), str(ROOT / "docs" / "manual")))
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    if status := subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": modules}).returncode:
        sys.exit(status)
    if dead := list(dead_links(folder / "site")):
        sys.exit("\n".join(["scripts/manual: links that lead nowhere:", *dead]))
    return folder / "site"


def lay_out(folder: Path) -> None:
    """Write the pages and the configuration that Zensical reads."""
    pages = folder / "pages"
    for name in PAGES:
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, pages / name)
    manual = pages / "docs" / "manual"
    (manual / "zensical.toml").rename(folder / "zensical.toml")
    for path in manual.glob("*.md"):
        path.write_text(with_trtopt(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in pages.rglob("*.md"):
        path.write_text(with_plain_fences(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, text in {
        "cli": command_line(),
        "functions": functions(),
        "classes": classes(),
        "errors": errors(),
    }.items():
        (manual / f"{name}.md").write_text(text, encoding="utf-8")


def dead_links(site: Path) -> Iterator[str]:
    """Links to files that aren't in the site, of whatever kind (Zensical looks at those to pages only)."""
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?:]+)[^":]*"', page.read_text(encoding="utf-8")):
            if page.name != "404.html" and not (page.parent / link).exists():
                yield f"{page.relative_to(site)}: {link}"


def with_plain_fences(page: str) -> str:
    """A page without the second words of its blocks, which are for tests: superfences takes such a block for running text."""
    return re.sub(r"^(```\w+) \w+$", r"\1", page, flags=re.M)


# Coming from other tools -------------------------------------------------------------------------------------------------


def with_trtopt(page: str) -> str:
    """A page with trtopt's way beside what it has of other tools."""
    page = re.sub(r"```bash migrate\n(.*?)```", lambda block: table_of_commands(block[1]), page, flags=re.S)
    page = page.replace("<!-- every option of trtexec -->", table_of_options())
    return page.replace("<!-- every removed name -->", table_of_names())


def table_of_commands(block: str) -> str:
    rows = []
    for command in block.replace("\\\n", " ").splitlines():
        found = migrated(command)
        rows.append((code(command), "<br>".join(map(code, found.commands)), "<br>".join(notes(found))))
    return table(("before", "trtopt", ""), rows)


def notes(found: Migration) -> Iterator[str]:
    for item in found.replaced:
        gone = f" (gone in {item.gone})" if item.gone else ""
        yield f"{code(item.what)}{gone}: {'no equivalent: ' * item.lacking}{prose(item.instead)}"


def table_of_options() -> str:
    model = "trtexec --onnx=M.onnx --saveEngine=M.engine"
    plain = migrated(model).commands
    rows = []
    for name in OPTIONS:
        if f"--{name}=" in model or name == "loadEngine":
            continue
        option = f"--{name}" + (f"={SAMPLES[name]}" if name in SAMPLES else "")
        found = migrated(f"{model} {option}")
        said = [f"{'no equivalent: ' * item.lacking}{prose(item.instead)}" for item in found.replaced]
        if not said:
            said = [code(command) for command in found.commands if command not in plain] or [SILENT[name]]
        gone = next((item.gone for item in found.replaced if item.gone), "")
        rows.append((code(option), gone, "<br>".join(said)))
    return table(("trtexec", "gone in", "trtopt"), rows)


def table_of_names() -> str:
    rows = []
    for row in read_toml(ROOT / "docs" / "manual" / "removed.toml")["removed"]:
        names = ", ".join(map(code, row["names"]))
        instead = f"{'no equivalent: ' * row.get('lacking', False)}{prose(row['instead'])}"
        rows.append((row.get("library", "tensorrt"), names, str(row["gone"]), instead))
    return table(("of", "name", "gone in", "trtopt"), rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def prose(text: str) -> str:
    """A sentence of trtopt's with its placeholders as they are, no HTML and no Markdown; a command as code."""
    if re.fullmatch(r"trtopt [a-z]+ (-|[A-Z]|my_model)((?!: |; |, | \(| [a-z]+s | N$).)*", text):
        return code(text)
    return re.sub(r"(?<!`)([<>*_|\[\]])", r"\\\1", text)


# Reference ---------------------------------------------------------------------------------------------------------------


def command_line() -> str:
    """What `trtopt COMMAND --help` says."""
    command = typer.main.get_command(cli.app)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command, info_name="trtopt"), name="trtopt", title="Command line"
    )
    return text.replace("`{", "`").replace("}`", "`")


def public() -> dict[str, object]:
    """Public names that have a docstring of their own."""
    return {name: getattr(trtopt, name) for name in trtopt.__all__ if callable(getattr(trtopt, name))}


def functions() -> str:
    chosen = [value for value in public().values() if inspect.isfunction(value)]
    return (
        f"# Functions\n\nEach is also [a command](cli.md). They can be imported from `trtopt`.\n\n{documented(chosen)}"
    )


def classes() -> str:
    chosen = [value for value in public().values() if inspect.isclass(value) and not issubclass(value, TrtoptError)]
    return f"# Classes\n\nWhat functions take and give. They can be imported from `trtopt`.\n\n{documented(chosen)}"


def errors() -> str:
    chosen = [value for value in public().values() if inspect.isclass(value) and issubclass(value, TrtoptError)]
    statuses = table(("exit status", "means"), [(code(status), meaning) for status, meaning in EXIT_STATUSES.items()])
    more = "`trtopt serve` ends with [tritonserver's own](../serving.md#a-server)."
    return f"# Errors and exit statuses\n\n{statuses}\n{more}\n\n{documented(chosen)}"


def documented(values: Iterable[object]) -> str:
    return "".join(f"::: {value.__module__}.{value.__qualname__}\n\n" for value in values)


if __name__ == "__main__":
    main()

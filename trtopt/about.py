"""The version, read where it is set: pyproject.toml, through the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("trtopt")
except PackageNotFoundError:  # run from a source tree that isn't installed
    __version__ = "0+unknown"

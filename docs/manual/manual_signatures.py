"""For the manual: public functions with the keywords that their requests give them, which only running code knows."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Gives functions under `@taking` the signature that `help()` shows."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any(str(decorator.value).startswith("taking(") for decorator in func.decorators):
            return
        signature = inspect.signature(getattr(importlib.import_module(func.module.path), func.name))
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    item.name,
                    annotation=str(item.annotation),
                    kind=_KINDS[item.kind],
                    default=None if item.default is item.empty else _written(item.default),
                )
                for item in signature.parameters.values()
            )
        )


def _written(default: object) -> str:
    text = repr(default)
    return f"{type(default).__name__}()" if text.startswith("<") else text  # without an address


_KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
}

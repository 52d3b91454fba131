"""`trtopt`, and `python -m trtopt`."""

from __future__ import annotations

import gc
import sys
from typing import NoReturn

from trtopt.core import stopping


def main() -> NoReturn:
    """The command line, from its first import to its end under `stopping`'s rules."""
    gc.disable()  # while half a million objects are imported that stay; `cli.application` looks for garbage again
    try:
        stopping.listen()
        from trtopt.cli import main as run

        run()
    except BaseException as left:  # SystemExit as a rule
        stopping.end()
        gc.freeze()  # or the interpreter's end passes over all that was imported, several times
        if stopping.status() is None:
            raise
        if not isinstance(left, SystemExit):
            print("stopped", file=sys.stderr)
    exec("")  # or CPython ends by SIGINT after `-m`, where the exception left the code of a text, such as a dataclass's
    sys.exit(stopping.status())


if __name__ == "__main__":
    main()

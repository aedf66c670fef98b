# SPDX-License-Identifier: Apache-2.0
"""`python -m quire`, and the entry point of the command `quire`."""

import os
import sys
from typing import NoReturn

_INTERRUPTED = 130


def run() -> NoReturn:
    """Run the command of this process's arguments, and end it. Ctrl-C during imports leaves no traceback."""
    _open_standard_streams()
    try:
        from quire.entrypoints.cli.main import main
        from quire.processes import leave
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    leave(main())


def _open_standard_streams() -> None:
    """Open closed standard streams (`2>&-`) on /dev/null, lest a file or socket gets their number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


if __name__ == "__main__":
    run()

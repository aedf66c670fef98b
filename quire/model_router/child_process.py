# SPDX-License-Identifier: Apache-2.0
"""Entry point of a model's server: `python -m quire.model_router.child_process PARENT_PID DIRECTORY CONFIG`.

It imports what a server needs, here and in the process of its engine core, while it waits for a line on its standard
input. Then it serves by the flags in CONFIG. It ends if the input is closed before.

Invariant: it never outlives the router. If the router is killed, it ends, removes the router's private directory, and
its own engine core follows.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

from quire.processes import leave, read_order, uncollected

KEYS = ("QUIRE_API_KEY", "QUIRE_ADMIN_API_KEY")
"""Variables that no other process inherits."""
AHEAD = (
    "quire.entrypoints.cli.main",
    "quire.entrypoints.cli.serve",
    "quire.entrypoints.openai.api_server",
    "quire.engine.async_llm",
    "quire.entrypoints.openai.adapter_serving",
    "quire.entrypoints.openai.app",
    "quire.entrypoints.openai.connection",
    "quire.entrypoints.openai.lifecycle",
    "quire.models.families.llama",
    "uvicorn.lifespan.off",
    "yaml",
)
"""Modules that a server imports after it has read its flags."""


def main() -> int:
    parent, directory, config = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    with uncollected():
        from quire.engine.core_service import ParentProcess
        from quire.engine.core_start import keep_spare

        ParentProcess(parent, directory).watch()
        keep_spare({name: value for name, value in os.environ.items() if name not in KEYS})
        _import_ahead()
    if not read_order():
        return 0

    from quire.entrypoints.cli.main import main as run_command

    return run_command(["serve", "--config", config])


def _import_ahead() -> None:
    from quire import features
    from quire.entrypoints.openai.api_server import loop_factory

    loop_factory()
    tables = (
        *(features.START_FEATURES, features.SERVER_FEATURES, features.BROWSER_PAGES, features.CORE_ROUTER),
        *(features.SLEEP_CONTROL, features.CONSTRAINTS, features.CORE_SUPERVISION, features.REQUEST_OWNERS),
    )
    places = [place for table in tables for place in table.values()]
    for name in (*AHEAD, *(place.partition(":")[0] for place in places)):
        import_module(name)


if __name__ == "__main__":
    leave(main())

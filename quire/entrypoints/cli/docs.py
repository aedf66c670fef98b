# SPDX-License-Identifier: Apache-2.0
"""Generator of docs/configuration.md: `python -m quire.entrypoints.cli.docs [FILE]`.

Invariant: the page is made from the config classes and the table of environment variables only; a test compares.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config import ModelRouterConfig, ServerConfig, child_configs
from quire.config.fields import Config, default_of, field_types, flag_of, info_of, plain_type
from quire.logging_setup import LEVELS

PAGE = Path("docs/configuration.md")

INTRODUCTION = """\
# Configuration

This page is generated: `python -m quire.entrypoints.cli.docs`.

Every field below is a flag of `quire serve`, a key of its `--config FILE` (YAML, without the leading dashes,
with `-` or `_`), and, the server's aside, a keyword of `quire.LLM(...)` (with `_`). The engine's flags are also
flags of `quire run`, `quire bench throughput` and `quire bench latency`. The command line wins over the file.

Integers may be written 2k (2000), 2K (2048), 1.5m and so on. A true-or-false flag `--x` has an opposite,
`--no-x`. Lists are given by repeating the flag. A value outside the limits is refused with a sentence that
names them.
"""

ENVIRONMENT = {
    "QUIRE_ADMIN_API_KEY": "The admin key if `--admin-api-key` is not given.",
    "QUIRE_API_KEY": "The server's key if `--api-key` is not given; the clients send it.",
    "QUIRE_CPU_ISA": "Instruction set of the C++ kernels: auto (default) or one that `quire doctor` lists.",
    "QUIRE_CPU_LIBRARY": "Another build of the C++ kernels to load, such as the one of `make sanitize`.",
    "QUIRE_DEBUG": "1: mistakes and start-up failures end in a traceback instead of one sentence.",
    "QUIRE_DEBUG_KERNELS": "1: C++ kernels find their outputs filled with NaN, so that what one leaves out shows.",
    "QUIRE_KERNELS": "auto (default), or reference: plain torch for every op.",
    "QUIRE_PLUGINS": "Names of the installed plug-ins to let in, with commas between; default: all; empty: none.",
    "QUIRE_LAST_IMPORTS": "Set by quire for its own processes: the directory in which they find modules last.",
    "QUIRE_LOG_FORMAT": "What `--log-format` says, of commands that have no such flag.",
    "QUIRE_LOG_LEVEL": f"{', '.join(LEVELS)}; what `--log-level` says, of commands that have no such flag.",
}  # Environment variable -> meaning.

_TYPE_NAMES = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    tuple: "list",
    dict: "JSON object",
}


def configuration_page() -> str:
    """Return the text of docs/configuration.md."""
    parts = [INTRODUCTION]
    for owner in (*child_configs().values(), ServerConfig, ModelRouterConfig):
        parts += [
            f"\n## {owner.__name__.removesuffix('Config')}\n\n{inspect.getdoc(owner)}\n\n",
            _table(owner),
        ]
    parts += ["\n## Environment variables\n\n| variable | meaning |\n|---|---|\n", *_rows(ENVIRONMENT)]
    return "".join(parts)


def _table(owner: type[Config]) -> str:
    rows = [_row(owner, field) for field in dataclasses.fields(owner)]
    return "| flag | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)


def _row(owner: type[Config], field: dataclasses.Field[Any]) -> str:
    info = info_of(field)
    kind = ", ".join(info.choices) or _TYPE_NAMES[plain_type(field_types(owner)[field.name])]
    limits = _limits(info.ge, info.gt, info.le)
    meaning = info.doc.replace("<", r"\<").replace("|", r"\|")
    return f"| `{flag_of(field.name)}` | {kind}{limits} | {_default(field)} | {meaning} |\n".replace(
        "|  |", "| |"
    )


def _limits(ge: float | None, gt: float | None, le: float | None) -> str:
    bounds = [f"{sign} {bound:g}" for sign, bound in (("≥", ge), (">", gt), ("≤", le)) if bound is not None]
    return f" {', '.join(bounds)}" if bounds else ""


def _default(field: dataclasses.Field[Any]) -> str:
    default = default_of(field)
    if default is None or default in ("", (), {}):
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _rows(meanings: Mapping[str, str]) -> list[str]:
    return [f"| `{name}` | {meaning} |\n" for name, meaning in meanings.items()]


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(configuration_page(), encoding="utf-8")

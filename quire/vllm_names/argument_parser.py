# SPDX-License-Identifier: Apache-2.0
"""`FlexibleArgumentParser`: argparse with vLLM's flags, for scripts that add their own to those of `EngineArgs`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from quire.config.argparse_flags import parse_object
from quire.errors import ConfigError
from quire.vllm_names.command_line import OwnFlag, translated_arguments
from quire.vllm_names.row import Takes


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Parser that accepts `_` for `-` in flags, and handles vLLM's flags as the `quire` command does."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse flags, those of vLLM included; exits with a message if one is not supported."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            given = translated_arguments(given, self._flags(), has_argument=True)
        except ConfigError as error:
            self.error(str(error))
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with one sentence; the usage, which has all options, is left to `--help`."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _flags(self) -> dict[str, OwnFlag]:
        return {
            flag: OwnFlag(action.dest, _takes(action), is_json=action.type is parse_object)
            for action in self._actions
            for flag in action.option_strings
        }


def _takes(action: argparse.Action) -> Takes:
    if action.nargs == 0:
        return Takes.NOTHING
    return Takes.MANY if action.nargs in ("+", "*") else Takes.ONE

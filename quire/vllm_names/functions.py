# SPDX-License-Identifier: Apache-2.0
"""Functions and an argument parser that vLLM's scripts import and quire has in another form."""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.fields import parse_object
from quire.errors import ConfigError
from quire.vllm_names.command_line import OwnFlag, translated_arguments
from quire.vllm_names.options import OPTIONS
from quire.vllm_names.row import Takes, translated

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer


def random_uuid() -> str:
    """Return 32 random hex digits, for a request's id."""
    return uuid.uuid4().hex


def get_tokenizer(
    tokenizer_name: str, *, revision: str | None = None, download_dir: str | None = None, **options: Any
) -> Tokenizer:
    """Return the tokenizer of a directory, a GGUF file or a Hugging Face id.

    Raises:
        TypeError: another option than vLLM's.
        ModelLoadError: there is no such model, or no tokenizer in it.
        ConfigError: an option is not supported.
    """
    unknown = translated(options, OPTIONS, ())
    if unknown:
        raise TypeError(f"get_tokenizer() got an unexpected keyword argument {next(iter(unknown))!r}")
    from quire.engine.tokenizer import Tokenizer
    from quire.models.checkpoint import resolve_model_dir

    return Tokenizer.from_dir(resolve_model_dir(tokenizer_name, revision, download_dir))


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

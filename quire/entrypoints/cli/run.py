# SPDX-License-Identifier: Apache-2.0
"""`quire run`: answer a prompt, or chat, in this process; also the local Python tools of `quire chat`.

`tool_of` makes a tool's schema from a function's signature and docstring. Invariant: every error of the model or the
function becomes the text of a result, which the model reads.
"""

from __future__ import annotations

import asyncio
import enum
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import click

from quire.config import BUNDLED_MODELS, DEMO_MODEL, DEMO_VISION
from quire.entrypoints.cli.client import enable_line_editing
from quire.entrypoints.cli.options import (
    EngineCommand,
    HumanInt,
    constraint_options,
    engine_config,
    structured_outputs,
)
from quire.entrypoints.cli.run_chat import (
    MEDIA_KINDS,
    AnswerPrinting,
    Asked,
    ChatSession,
    MediaFile,
    user_message,
)
from quire.errors import ConfigError, ValidationError
from quire.torch_import import hastened_import
from quire.vllm_names.command_line import FLAGS
from quire.vllm_names.llama_options import RUN_OPTIONS
from quire.vllm_names.row import nearest

SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
SECTION = re.compile(
    r"^(?:args|arguments|parameters|returns?|raises|yields|examples?|notes?):\s*$", re.IGNORECASE
)
ARGUMENT = re.compile(r"^(?P<name>\*{0,2}\w+)(?:\s*\([^)]*\))?:\s*(?P<text>.*)$")
Schema = dict[str, Any]

Function = Callable[..., Any]
DENIED = "The user does not want this to be run."
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stop", "ignore_eos")
PROMPT_TOKENS, CHAT_TOKENS = 256, 2048  # Most tokens of an answer, unless given.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
PATH_STARTS = ("./", "../", "/", "~/")
SHORT_NAME = re.compile(r"[A-Za-z][\w.-]*(:[\w.-]+|\d[\w.-]*)")
"""Names such as gpt2, and Ollama's, such as llama3.2:1b, about which the model's error says more."""


class _MediaPath(click.Path):
    """Path of an existing file; an address is refused in words."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, resolve_path=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in value or value.startswith("data:"):
            self.fail(f"{value!r:.60} is a URL; download it, and give the path of the file", param, ctx)
        return super().convert(value, param, ctx)


def _media_option(kind: str, help_text: str) -> Callable[[Function], Function]:
    return click.option(f"--{kind}", multiple=True, type=_MediaPath(), help=help_text)


def tool_of(function: Callable[..., Any]) -> Schema:
    """Return a function as an entry of `tools`.

    Raises:
        ConfigError: an argument is positional-only, or has a type without a JSON equivalent.
    """
    about, arguments = _words(inspect.getdoc(function) or "")
    parameters = _parameters(function, arguments)
    described = {"description": about} if about else {}
    return {
        "type": "function",
        "function": {"name": function.__name__, **described, "parameters": parameters},
    }


def _parameters(function: Callable[..., Any], words: Mapping[str, str]) -> Schema:
    name = function.__name__
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"--tool {name}: an annotation refers to an undefined name: {error}") from None
    properties: Schema = {}
    required: list[str] = []
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(f"--tool {name}: its argument {key} can only be given by position")
        properties[key] = _of_type(hints.get(key, Any), f"--tool {name}: its argument {key}")
        if key in words:
            properties[key].setdefault("description", words[key])
        if parameter.default is parameter.empty:
            required.append(key)
    return schema


def _of_type(hint: Any, where: str) -> Schema:
    """Return the JSON schema of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if hint is None:
        return {"type": "null"}
    if origin is typing.Annotated:
        described = next((word for word in inner[1:] if isinstance(word, str)), None)
        return {**_of_type(inner[0], where), **({"description": described} if described else {})}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_type(option, where) for option in inner]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    return _of_container(origin or hint, inner, where)


def _of_container(origin: Any, inner: Sequence[Any], where: str) -> Schema:
    if origin in (list, tuple, set, frozenset, Sequence):
        items = [one for one in inner[:1] if one is not Ellipsis]
        return {"type": "array", **({"items": _of_type(items[0], where)} if items else {})}
    if origin in (dict, Mapping):
        values = {"additionalProperties": _of_type(inner[1], where)} if len(inner) == 2 else {}
        return {"type": "object", **values}
    raise ConfigError(f"{where} has a type without a JSON equivalent: {origin!r:.80}")


def _words(doc: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's description of the function, up to its first section, and of each argument."""
    about: list[str] = []
    arguments: dict[str, str] = {}
    section, last = "", ""
    for line in doc.splitlines():
        if SECTION.match(line):
            section, last = line.strip().rstrip(":").lower(), ""
        elif not section:
            about.append(line)
        elif section.startswith(("arg", "param")) and (text := line.strip()):
            found = ARGUMENT.match(text)
            if found is not None:
                last, arguments[found["name"]] = found["name"], found["text"]
            elif last:
                arguments[last] += f" {text}"
    return "\n".join(about).strip(), arguments


class LocalTools:
    """Python functions that the model may call, by name.

    Args:
        confirm: asks the user whether a call, given as text, may run.
    """

    def __init__(self, functions: Iterable[Function], confirm: Callable[[str], bool]) -> None:
        self._functions: dict[str, Function] = {}
        for function in functions:
            if function.__name__ in self._functions:
                raise ConfigError(f"--tool: two functions are called {function.__name__}")
            self._functions[function.__name__] = function
        self.described = [tool_of(function) for function in self._functions.values()]
        self._confirm = confirm

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with the result of a call, an entry of a message's `tool_calls`."""
        function = call["function"]
        content = self._result(function["name"], function["arguments"])
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    def _result(self, name: str, arguments_text: str) -> str:
        function = self._functions.get(name)
        if function is None:
            return f"Error: there is no tool {name}; there are: {', '.join(self._functions)}"
        try:
            arguments = json.loads(arguments_text or "{}")
            inspect.signature(function).bind(**arguments)
        except (TypeError, ValueError, RecursionError) as error:
            return f"Error: {name} cannot be called with these arguments: {error}"
        if not self._confirm(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"):
            return DENIED
        return _run(function, arguments)


def _run(function: Function, arguments: Mapping[str, Any]) -> str:
    try:
        value = function(**arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except Exception as error:  # an error of the user's function is reported to the model
        return f"Error: {type(error).__name__}: {error}"


def find_functions(names: Iterable[str]) -> list[Function]:
    """Return the functions that the `--tool` flags name.

    Args:
        names: each `module:function`, `file.py:function`, or `file.py` for all its public functions.

    Raises:
        ConfigError: a name is not found, or its module fails.
    """
    return [function for name in names for function in _functions(name)]


def _functions(name: str) -> list[Function]:
    place, colon, attribute = name.rpartition(":")
    if not colon:
        place, attribute = name, ""
    if not place or not (attribute or place.endswith(".py")):
        raise ConfigError(f"--tool must be module:function or a file that ends with .py, got {name!r}")
    module = _module(place)
    if not attribute:
        return _public(module, place)
    function = getattr(module, attribute, None)
    if not inspect.isfunction(function):
        raise ConfigError(f"--tool {name}: {place} has no function {attribute!r}")
    return [function]


def _public(module: ModuleType, place: str) -> list[Function]:
    """Return the functions defined in a file, in order."""
    found: list[Function] = [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not found:
        raise ConfigError(f"--tool {place}: the file has no public function")
    return found


def _module(place: str) -> ModuleType:
    try:
        return _from_file(Path(place)) if place.endswith(".py") else _imported(place)
    except Exception as error:  # the user's module may raise anything on import
        raise ConfigError(f"--tool {place}: {type(error).__name__}: {error}") from error


def _imported(name: str) -> ModuleType:
    """Import a module, also from the current directory, as `python -m` does."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError("no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # annotations and dataclasses look modules up here
    spec.loader.exec_module(module)
    return module


class RunCommand(EngineCommand):
    """Command whose output is the answer: it logs warnings only, unless the log is asked for."""

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params["log_level"] is None and "QUIRE_LOG_LEVEL" not in os.environ:
            ctx.params["log_level"] = "warning"
        return super().invoke(ctx)


@click.command(cls=RunCommand, vllm_flags={**FLAGS, **RUN_OPTIONS})
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]")
@constraint_options
@click.option("--max-tokens", type=HumanInt(), help="Most tokens to generate; default: 256, in a chat 2048.")
@click.option("--temperature", type=click.FLOAT, help="Randomness; 0: always the most likely token.")
@click.option("--top-p", type=click.FLOAT, help="Draw from the likeliest tokens with this total probability.")
@click.option("--top-k", type=HumanInt(), help="Draw from this many of the likeliest tokens; 0: all.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Continue after the model's end-of-sequence token.")
@click.option("--system-prompt", help="System message put before the prompt.")
@_media_option("image", "Image to show to the model, before the prompt's text; may be given several times.")
@_media_option("video", "Video to show to the model; as --image.")
@_media_option("audio", "Sound to play to a model that hears; as --image.")
@click.option("--raw", is_flag=True, help="Continue the prompt verbatim, without the chat template.")
def run(words: tuple[str, ...], system_prompt: str | None, raw: bool, **params: Any) -> None:
    """Answer PROMPT with MODEL and end; without PROMPT, chat on a terminal, or answer standard input.

    MODEL is a directory, a GGUF file or a Hugging Face id, and may be given by --model as well; without one, a toy in
    the box answers, with --image the one that sees. One word that looks like a model's name or path is no prompt. A
    PROMPT of `-` is standard input. A model with a chat template gets the prompt as a user's message. Sampling flags
    that are not given follow the model's generation config; `--seed` makes the draw reproducible.
    """
    if raw and system_prompt:
        raise click.UsageError("--system-prompt needs a chat template; drop --raw")
    files = [(kind, path) for kind in MEDIA_KINDS for path in params.pop(kind)]
    if raw and files:
        raise click.UsageError(f"--{files[0][0]} needs a chat template; drop --raw")
    form = structured_outputs(params)
    params["model"], prompt = model_and_prompt(words, params["model"])
    if params["model"] is None and any(kind == "image" for kind, _ in files):
        params["model"] = DEMO_VISION
    if params["model"] is None and len(words) == 1 and words[0].isalpha() and sys.stderr.isatty():
        click.echo(
            f"{words[0]!r} is the prompt; a model is named before it, and {DEMO_MODEL} answers", err=True
        )
    is_chat = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if is_chat and raw:
        raise click.UsageError("--raw needs a PROMPT")
    text = _standard_input() if prompt in (None, "-") and not is_chat else prompt or ""
    if params["max_tokens"] is None:
        params["max_tokens"] = CHAT_TOKENS if is_chat else PROMPT_TOKENS
    config = engine_config(params)

    with hastened_import():
        from quire.engine.llm_engine import LLMEngine
        from quire.entrypoints.chat.media import OfflineMedia

        engine = LLMEngine(config)
    media = OfflineMedia(engine.config)
    try:
        given = {name: params[name] for name in SAMPLING if params.get(name) is not None}
        given |= {} if form is None else {"structured_outputs": form}
        if engine.tokenizer is None:
            raise ValidationError("quire run needs a tokenizer; drop --skip-tokenizer-init")
        printing = AnswerPrinting(engine, media)
        if is_chat:
            _chat(printing, system_prompt, files, given)
        else:
            printing.answer(_asked(printing, text, system_prompt, raw, files), given)
    finally:
        media.close()
        engine.shutdown()


def _standard_input() -> str:
    """Return the prompt on standard input.

    Raises:
        UsageError: it is empty or closed, or no text of the locale's encoding.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # the POSIX locale lets bytes through that are no text
    try:
        text = "" if sys.stdin is None else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"standard input is not {error.encoding} text, by its byte {error.start}"
        ) from None
    if not text.strip():
        raise click.UsageError("standard input is empty; give a PROMPT, or run it on a terminal to chat")
    return text


def model_and_prompt(words: Sequence[str], model: str | None) -> tuple[str | None, str | None]:
    """Return the model and the prompt of the arguments; `model` is that of --model.

    Raises:
        UsageError: there are too many.
    """
    if len(words) > 2 or (len(words) == 2 and model is not None):
        raise click.UsageError("give a model and a prompt at most; put the prompt in quotes")
    if len(words) == 2:
        return words[0], words[1]
    if len(words) == 1 and (model is not None or not names_model(words[0])):
        return model, words[0]
    return (words[0] if words else model), None


def names_model(word: str) -> bool:
    """Return whether an argument names a model, be it one that does not exist, rather than being a prompt."""
    if word in BUNDLED_MODELS or word.endswith(".gguf") or HUB_ID.fullmatch(word):
        return True
    if any(map(str.isspace, word)):
        return _holds_model(word)
    is_near = nearest(word, BUNDLED_MODELS) is not None
    return (
        word.startswith(PATH_STARTS)
        or SHORT_NAME.fullmatch(word) is not None
        or is_near
        or _holds_model(word)
    )


def _holds_model(word: str) -> bool:
    """Return whether a directory holds a model; a prompt may be longer than the name of any."""
    has_config = os.path.isfile(os.path.join(word, "config.json"))
    return has_config or (os.path.isdir(word) and any(Path(word).glob("*.gguf")))


def _asked(
    printing: AnswerPrinting, text: str, system_prompt: str | None, raw: bool, files: Sequence[MediaFile]
) -> Asked:
    if raw or not (printing.has_chat or system_prompt or files):
        return Asked(text)
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return printing.ask([*messages, user_message(text, files)])


def _chat(
    printing: AnswerPrinting, system_prompt: str | None, files: Sequence[MediaFile], given: dict[str, Any]
) -> None:
    if not printing.has_chat:
        raise ValidationError("the model has no chat template; give a PROMPT to continue")
    enable_line_editing()
    click.echo("Type a message; /help lists the commands, Ctrl-D ends.", err=True)
    ChatSession(printing, system_prompt, given, files).run()

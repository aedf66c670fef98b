# SPDX-License-Identifier: Apache-2.0
"""Reader of `--models`: a YAML file of models, or a directory of checkpoints.

Invariant: strict. An unknown or repeated key and a bad value are errors that name the line, the model and the key; the
options of each model are checked as `quire serve` would check them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from quire.adapters import MODULES_FLAG
from quire.config import ModelRouterConfig
from quire.config.fields import hashed_key
from quire.errors import ConfigError, QuireError, yaml_place
from quire.models.checkpoint_files import has_file
from quire.models.gguf.model import gguf_in, is_first_part

FILE_KEYS = ("models", "defaults", "default_model")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNITS = {unit: 1000 ** (power + 1) for power, unit in enumerate("kmgt")}
_UNITS |= {unit: 1024 ** (power + 1) for power, unit in enumerate("KMGT")}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,256}")
OptionCheck = Callable[[Mapping[str, Any]], None]
"""Checks flags of `quire serve`, by name, as a config file gives them; raises QuireError."""


@dataclass(frozen=True)
class ModelEntry:
    """One model of the file.

    Attributes:
        model: directory, GGUF file or Hugging Face id.
        keep_alive_s: idle seconds until it is unloaded; infinite: never.
        sleep: whether it may sleep to make room for others.
        kv_cache_bytes: size of its KV cache; None: chosen by the router.
        memory_bytes: all memory that it takes; None: estimated.
        max_requests: most requests in progress and waiting; None: no limit.
        api_keys: hashed keys that may use it, in place of the server's; empty: the server's.
        options: flags of its server, without dashes in front.
    """

    name: str
    model: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    preload: bool = False
    keep_alive_s: float = math.inf
    sleep: bool = True
    kv_cache_bytes: int | None = None
    memory_bytes: int | None = None
    max_requests: int | None = None
    api_keys: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def other_names(self) -> tuple[str, ...]:
        """Aliases, and the adapters that its flags name, NAME=DIRECTORY each."""
        adapters = self.options.get(MODULES_FLAG.lstrip("-"), ())
        listed = [adapters] if isinstance(adapters, str) else adapters
        return (*self.aliases, *(str(one).partition("=")[0] for one in listed))


@dataclass(frozen=True)
class Models:
    """All models by name, and the name of the one for requests that name none."""

    entries: Mapping[str, ModelEntry]
    default: str | None = None

    def resolve(self, name: str) -> str | None:
        """Return the model of a name, an alias, or one of them with Ollama's tag "latest"; None: unknown."""
        found = self._names.get(name)
        return found if found is not None else self._names.get(name.removesuffix(":latest"))

    @property
    def _names(self) -> dict[str, str]:
        names = {other: entry.name for entry in self.entries.values() for other in entry.other_names}
        return {**names, **{name: name for name in self.entries}}


def read_models(
    config: ModelRouterConfig, check_options: OptionCheck, inherited: Mapping[str, Any]
) -> Models:
    """Return the models of `--models`.

    Args:
        inherited: flags of the command line that hold for every model, unless the file says otherwise.

    Raises:
        ConfigError: the file or directory cannot be read, or something in it is wrong.
    """
    assert config.models is not None, "--models was given"
    path = Path(config.models).expanduser()
    keep_alive_s = _seconds(config.models_keep_alive)
    if path.is_dir():
        return _read_directory(path, keep_alive_s, check_options, inherited)
    return _YamlFile(path, keep_alive_s, check_options, inherited).read()


def _seconds(number: float) -> float:
    return math.inf if number < 0 else float(number)


def parse_keep_alive(value: Any) -> float | None:
    """Return the seconds of a keep-alive: a number, or text such as "5m" or "1h30m"; negative: for ever.

    Returns None if the value is neither.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _seconds(value) if not math.isnan(value) else None
    if not isinstance(value, str):
        return None
    text = value.strip()
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return _seconds(float(text))
    is_negative, text = text.startswith("-"), text.removeprefix("-")
    if not re.fullmatch(f"({_DURATION.pattern})+", text):
        return None
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
    return math.inf if is_negative else seconds


def parse_bytes(value: Any) -> int | None:
    """Return the bytes of an integer or of text such as "2G" (K, M, G, T: powers of 1024; k, m, g, t: of 1000)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value > 0 else None
    found = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    return int(float(found[1]) * _UNITS.get(found[2], 1)) or None


def _read_directory(
    path: Path, keep_alive_s: float, check_options: OptionCheck, inherited: Mapping[str, Any]
) -> Models:
    """Return the checkpoints in a directory: folders, by their names, and GGUF files, without their ending."""
    found = {one.stem if one.is_file() else one.name: one for one in sorted(path.iterdir()) if _is_model(one)}
    if not found:
        raise ConfigError(f"--models {path}: no folder with config.json and no *.gguf file in it")
    check_options(inherited)
    entries = {
        name: ModelEntry(name, str(one.absolute()), keep_alive_s=keep_alive_s, options=dict(inherited))
        for name, one in found.items()
    }
    return Models(entries, next(iter(entries)) if len(entries) == 1 else None)


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return has_file(path / "config.json") or gguf_in(path) is not None
    return path.suffix == ".gguf" and is_first_part(path.name)


class _YamlFile:
    """One YAML file, with the lines of its keys."""

    def __init__(
        self, path: Path, keep_alive_s: float, check_options: OptionCheck, inherited: Mapping[str, Any]
    ) -> None:
        self._path = path
        self._keep_alive_s = keep_alive_s
        self._check_options = check_options
        self._inherited = inherited

    def read(self) -> Models:
        try:
            return self._read()
        except RecursionError:
            raise ConfigError(
                f"--models {self._path} is nested too deeply, or an anchor (&) contains itself"
            ) from None

    def _read(self) -> Models:
        root = self._mapping(self._root(), "the file")
        self._known(root, FILE_KEYS, "")
        defaults = self._values(root["defaults"][1], "defaults") if "defaults" in root else {}
        if "models" not in root:
            raise ConfigError(
                f"--models {self._path}: there is no key 'models', a mapping of names to models"
            )
        nodes = self._mapping(root["models"][1], "models")
        entries = {name: self._entry(name, line, node, defaults) for name, (line, node) in nodes.items()}
        if not entries:
            raise ConfigError(f"--models {self._path}: 'models' names no model")
        models = Models(entries)
        self._check_names(models, nodes)
        return Models(entries, self._default(root, models))

    def _default(self, root: dict[str, tuple[int, yaml.Node]], models: Models) -> str | None:
        if "default_model" not in root:
            return next(iter(models.entries)) if len(models.entries) == 1 else None
        line, node = root["default_model"]
        name = self._plain(node)
        found = models.resolve(name) if isinstance(name, str) else None
        if found is None:
            self._fail(line, f"default_model {name!r} is none of {', '.join(models.entries)}")
        return found

    def _check_names(self, models: Models, nodes: Mapping[str, tuple[int, yaml.Node]]) -> None:
        seen: dict[str, str] = {}
        for name, entry in models.entries.items():
            for one in (name, *entry.other_names):
                if not _NAME.fullmatch(one):
                    self._fail(
                        nodes[name][0], f"{one!r:.80} is no name: 1 to 256 characters without white space"
                    )
                owner = seen.get(one, name if one == name or one not in models.entries else one)
                if one in seen or owner != name:
                    both = (
                        f"is given twice to {name!r}"
                        if owner == name
                        else f"belongs to {owner!r} and to {name!r}"
                    )
                    self._fail(nodes[name][0], f"the name {one!r} {both}")
                seen[one] = name

    def _entry(
        self, name: str, line: int, node: yaml.Node, defaults: dict[str, tuple[int, Any]]
    ) -> ModelEntry:
        own = self._values(node, name)
        if "model" not in own:
            self._fail(line, f"model {name!r}: there is no key 'model', a directory, a GGUF file or an id")
        given = {**defaults, **own}
        fields = {key: self._checked(name, key, *given[key]) for key in given if key != "options"}
        options = dict(self._inherited)
        for part in (defaults, own):
            at, values = part.get("options", (line, {}))
            options |= self._options(name, at, values)
        renamed = {_FIELDS.get(key, key): value for key, value in fields.items()}
        renamed.setdefault("keep_alive_s", self._keep_alive_s)
        return ModelEntry(name=name, options=options, **renamed)

    def _options(self, name: str, line: int, values: Any) -> dict[str, Any]:
        if not isinstance(values, dict):
            self._fail(line, f"{name}: options must be a mapping of flags to values, not {values!r:.80}")
        options = {key.replace("_", "-"): value for key, value in values.items()}
        if len(options) < len(values):
            self._fail(line, f"{name}: options: one is given twice, with - and with _")
        try:
            self._check_options({**self._inherited, **options})
        except QuireError as error:
            self._fail(line, f"{name}: options: {error}")
        return options

    def _checked(self, name: str, key: str, line: int, value: Any) -> Any:
        what, check = _CHECKS[key]
        try:
            return check(value)
        except _BadValueError as error:
            got = "" if key == "api_keys" else f", got {value!r:.80}"  # no key is shown
            self._fail(line, f"{name}: {key} must be {what}{got}{error}")

    def _values(self, node: yaml.Node, name: str) -> dict[str, tuple[int, Any]]:
        """Return key -> (line, value) of a model's mapping, whose keys are known."""
        keys = tuple(key for key in (*_CHECKS, "options") if name != "defaults" or key not in _OWN_KEYS)
        given = self._mapping(node, name)
        self._known(given, keys, f"{name}: ")
        return {key: (line, self._plain(value)) for key, (line, value) in given.items()}

    def _known(self, given: Mapping[str, tuple[int, Any]], keys: tuple[str, ...], where: str) -> None:
        for key, (line, _) in given.items():
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(keys)}"
                self._fail(line, f"{where}unknown key {key!r}; {hint}")

    def _root(self) -> yaml.Node:
        try:
            text = self._path.read_text(encoding="utf-8")
            loader = yaml.SafeLoader(text)
            try:
                node = loader.get_single_node()
            finally:
                loader.dispose()
        except OSError as error:
            raise ConfigError(f"--models {self._path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"--models {self._path} is not YAML{yaml_place(error)}") from None
        if node is None:
            raise ConfigError(f"--models {self._path} is empty; it must have the key 'models'")
        return node

    def _mapping(self, node: yaml.Node, what: str) -> dict[str, tuple[int, yaml.Node]]:
        """Return key -> (line, node of the value); keys are texts, and each occurs once."""
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            self._fail(line, f"{what} must be a mapping")
        found: dict[str, tuple[int, yaml.Node]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                self._fail(line, f"{what}: a key must be text")
            if key.value in found:
                self._fail(line, f"{what}: the key {key.value!r} is given twice")
            found[key.value] = line, value
        return found

    def _plain(self, node: yaml.Node) -> Any:
        """Return a node's value; mappings in it have text keys, each once."""
        if isinstance(node, yaml.MappingNode):
            return {key: self._plain(value) for key, (_, value) in self._mapping(node, "the mapping").items()}
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(one) for one in node.value]
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_document(node)
        except yaml.YAMLError as error:
            self._fail(node.start_mark.line + 1, " ".join(str(error).split()))
        finally:
            loader.dispose()

    def _fail(self, line: int, text: str) -> NoReturn:
        raise ConfigError(f"--models {self._path}, line {line}: {text}")


class _BadValueError(Exception):
    """Value that a key cannot have; the text is added to the message."""


def _of_type(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind or value == "":
            raise _BadValueError
        return value

    return check


def _parsed(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        found = parse(value)
        if found is None:
            raise _BadValueError
        return found

    return check


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise _BadValueError
    return tuple(value)


def _keys(value: Any) -> tuple[str, ...]:
    try:
        return tuple(hashed_key(one, "an API key") for one in _texts(value))
    except ConfigError as error:
        raise _BadValueError(f": {error}") from None


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _BadValueError
    return value


_SIZE = 'a number of bytes, such as 4294967296 or "4G"'
_CHECKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "model": ("a directory, a GGUF file or an id", _of_type(str)),
    "aliases": ("a list of names", _texts),
    "pinned": ("true or false", _of_type(bool)),
    "preload": ("true or false", _of_type(bool)),
    "keep_alive": ('seconds or text such as "10m"; negative: for ever', _parsed(parse_keep_alive)),
    "sleep": ("true or false", _of_type(bool)),
    "kv_cache": (_SIZE, _parsed(parse_bytes)),
    "memory": (_SIZE, _parsed(parse_bytes)),
    "max_requests": ("an integer of at least 1", _count),
    "api_keys": ("a list of keys, plain or as sha256:HEX", _keys),
}
"""Key of a model -> what its value must be, in words, and the function that returns it."""
_FIELDS = {"keep_alive": "keep_alive_s", "kv_cache": "kv_cache_bytes", "memory": "memory_bytes"}
_OWN_KEYS = ("model", "aliases")

# SPDX-License-Identifier: Apache-2.0
"""`--models`: what a file and a directory mean, and how mistakes are told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.config import ModelRouterConfig, ServerConfig
from quire.entrypoints.cli.main import main
from quire.errors import ConfigError
from quire.model_router.flags import inherited_flags, server_flags
from quire.model_router.memory import MIN_KV_BYTES, PROCESS_BYTES, estimate
from quire.model_router.models_file import ModelEntry, Models, parse_bytes, parse_keep_alive, read_models
from tests.fixtures.folded import folded

GIB = 1 << 30


def read(tmp_path: Path, text: str, inherited: Mapping[str, Any] | None = None) -> Models:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return read_models(ModelRouterConfig(models=str(file)), lambda options: None, inherited or {})


def test_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    models = read(
        tmp_path,
        """
        default_model: second
        defaults:
          keep_alive: 5m
          options: {max-num-seqs: 8, dtype: float32}
        models:
          first:
            model: path/to/first
            aliases: [one, uno]
            pinned: true
            keep_alive: -1
            kv_cache: 1G
            memory: 4294967296
            max_requests: 3
            options: {max_num_seqs: 4, lora-modules: ["tuned=path/to/adapter"]}
          second: {model: owner/name, sleep: false, preload: true}
        """,
        {"seed": 7},
    )
    first, second = models.entries.values()
    assert models.default == "second"
    assert first.options == {
        "seed": 7,
        "max-num-seqs": 4,
        "dtype": "float32",
        "lora-modules": ["tuned=path/to/adapter"],
    }
    assert (first.keep_alive_s, first.kv_cache_bytes, first.memory_bytes) == (math.inf, GIB, 4 * GIB)
    assert (first.pinned, first.max_requests, first.sleep) == (True, 3, True)
    assert (second.keep_alive_s, second.preload, second.sleep) == (300.0, True, False)
    names = "first", "one", "uno", "uno:latest", "tuned", "second", "third"
    assert [models.resolve(name) for name in names] == [*["first"] * 5, "second", None]


def test_only_model_is_the_default(tmp_path: Path) -> None:
    assert read(tmp_path, "models: {a: {model: b}}").default == "a"
    assert read(tmp_path, "models: {a: {model: b}, c: {model: d}}").default is None


@folded(
    ("text", "message"),
    [
        ("", "is empty; it must have the key 'models'"),
        ("[", "is not YAML"),
        ("models: {}", "'models' names no model"),
        ("default_model: a", "there is no key 'models'"),
        ("- a", "line 1: the file must be a mapping"),
        ("models: {a: {model: x}}\nmodel: y", "line 2: unknown key 'model'; did you mean 'models'?"),
        ("models:\n  a: {modell: x}", "line 2: a: unknown key 'modell'; did you mean 'model'?"),
        ("models:\n  a: {pinned: true}", "line 2: model 'a': there is no key 'model'"),
        ("models:\n  a: {model: x}\n  a: {model: y}", "line 3: models: the key 'a' is given twice"),
        ("models:\n  a:\n    model: x\n    pinned: 1", "line 4: a: pinned must be true or false, got 1"),
        ("models: {a: {model: 5}}", "a: model must be a directory, a GGUF file or an id, got 5"),
        ("models: {a: {model: x, keep_alive: soon}}", "a: keep_alive must be seconds or text"),
        ("models: {a: {model: x, kv_cache: 0}}", "a: kv_cache must be a number of bytes"),
        ("models: {a: {model: x, memory: 1 GB}}", "a: memory must be a number of bytes"),
        ("models: {a: {model: x, max_requests: 0}}", "a: max_requests must be an integer of at least 1"),
        ("models: {a: {model: x, aliases: b}}", "a: aliases must be a list of names, got 'b'"),
        ("models: {a: {model: x, options: [1]}}", "a: options must be a mapping of flags"),
        ("models: {a: {model: x, aliases: [b]}, b: {model: y}}", "the name 'b' belongs to"),
        ("models: {a: {model: x, aliases: [c]}, b: {model: y, aliases: [c]}}", "the name 'c' belongs to"),
        ("models: {a: {model: x, aliases: [a]}}", "line 1: the name 'a' is given twice to 'a'"),
        ("models: {a: {model: x, aliases: [b, b]}}", "the name 'b' is given twice to 'a'"),
        ("models: {a: {model: x, aliases: [b]}}\ndefault_model: c", "line 2: default_model 'c' is none of a"),
        ("models: {a b: {model: x}}", "'a b' is no name"),
        ("models: {a: {model: x}}\ndefault_model: b", "line 2: default_model 'b' is none of a"),
        ("models: {a: {model: x}}\ndefaults: {model: y}", "line 2: defaults: unknown key 'model'"),
        ("models: {a: x}", "a must be a mapping"),
        ("models: {[a]: {model: x}}", "a key must be text"),
        ("models: {a: {model: !!python/object:os.system x}}", "line 1"),
        (
            "models: {a: {model: x, options: {max-num-seqs: 1, max_num_seqs: 2}}}",
            "given twice, with - and with _",
        ),
        ("models: {a: &a {model: x, options: {seed: *a}}}", "an anchor (&) contains itself"),
        (f"models: {'[' * 3000}", "is nested too deeply"),
    ],
)
def test_mistake_in_a_file_names_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--models {tmp_path}/models.yaml")


def test_mistake_in_keys_shows_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "models: {a: {model: x, api_keys: ['sha256:secret']}}")
    assert "a: api_keys must be a list of keys" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_missing_file_and_empty_directory_are_errors(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "no folder with config.json")):
        with pytest.raises(ConfigError, match=message):
            read_models(ModelRouterConfig(models=str(path)), lambda options: None, {})


def test_directory_is_one_model_a_folder_or_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    for name in ("tiny.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "README.md"):
        (tmp_path / name).touch()
    config = ModelRouterConfig(models=str(tmp_path), models_keep_alive=60.0)
    models = read_models(config, lambda options: None, {"dtype": "float32"})
    assert {name: entry.model for name, entry in models.entries.items()} == {
        "big-00001-of-00002": f"{tmp_path}/big-00001-of-00002.gguf",
        "llama": f"{tmp_path}/llama",
        "tiny": f"{tmp_path}/tiny.gguf",
    }
    assert models.default is None
    assert models.entries["llama"].options == {"dtype": "float32"}
    assert models.entries["llama"].keep_alive_s == 60.0


@folded(
    ("value", "seconds"),
    [
        (5, 5.0), (0, 0.0), (-1, math.inf), ("5m", 300.0), ("1h30m", 5400.0), ("-1", math.inf), ("-5m", math.inf),
        ("0", 0.0), ("250ms", 0.25), (" 10s ", 10.0), ("", None), ("5 m", None), (True, None), (math.nan, None),
        ([], None), ("1e9", None),
    ],
)  # fmt: skip
def test_keep_alive_is_seconds_or_text(value: Any, seconds: float | None) -> None:
    assert parse_keep_alive(value) == seconds


@folded(
    ("value", "num_bytes"),
    [
        (1024, 1024),
        ("2G", 2 * GIB),
        ("2g", 2 * 10**9),
        ("1.5K", 1536),
        ("x", None),
        (0, None),
        (True, None),
        (-1, None),
    ],
)
def test_bytes_are_a_number_with_a_unit(value: Any, num_bytes: int | None) -> None:
    assert parse_bytes(value) == num_bytes


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused models file fails at once, and nothing is served."""
    monkeypatch.setattr("quire.model_router.run.run_router", lambda *args, **options: 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "{file}", "quire-demo"], "MODEL quire-demo and --models are both given"),
        (
            ["--models", "{file}", "--model", "x"],
            "--model is for one model; with --models use the key 'model'",
        ),
        (["--models", "{file}", "--kv-cache-memory-bytes", "1G"], "use the key 'kv_cache'"),
        (["--models", "{file}", "--headless"], "--headless is for one model"),
        (["--models-memory", "1G"], "--models-memory has no effect without --models"),
        (["--models", "{file}", "--max-tools", "0"], "--max-tools must be at least 1, got 0"),
    ],
)
def test_flags_that_contradict_models_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {model: quire-demo}}")
    assert main(["serve", *(flag.format(file=file) for flag in flags)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{max-num-seq: 4}", "a: options: unknown option 'max-num-seq'; did you mean 'max-num-seqs'?"),
        ("{max-tools: 0}", "a: options: --max-tools must be at least 1, got 0"),
        ("{max-num-seqs: many}", "a: options:"),
        ("{port: 1}", "a: options: port is an option of the router: give it on the command line"),
        ("{api_key: x}", "a: options: api-key is an option of the router"),
        ("{model: x}", "a: options: model belongs elsewhere: the key 'model' of the entry"),
        ("{kv-cache-memory-bytes: 1G}", "belongs elsewhere: the key 'kv_cache' of the entry"),
        ("{models: x}", "a: options: models is an option of the router"),
    ],
)
def test_bad_options_of_a_model_are_refused_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n  a:\n    model: quire-demo\n    options: {options}\n")
    assert main(["serve", "--models", str(file)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"--models {file}, line 4: " in error
    assert message in error


def test_flags_of_the_command_line_reach_every_model() -> None:
    given = {
        "models": "x",
        "port": 1,
        "api_key": ("k",),
        "max_num_seqs": 4,
        "lora_modules": ("a=b",),
        "host": "::",
    }
    assert inherited_flags(given) == {"max-num-seqs": 4, "lora-modules": ["a=b"]}


def test_memory_of_the_included_model_is_its_parts() -> None:
    entry = ModelEntry("a", "quire-demo")
    found = estimate(entry, 64 * GIB)
    assert (
        found.size.needed_bytes
        == PROCESS_BYTES + found.weight_bytes + found.kv_cache_bytes + found.step_bytes
    )
    assert found.size.asleep_bytes == PROCESS_BYTES + found.weight_bytes
    assert found.max_model_len == 2048
    few = estimate(ModelEntry("a", "quire-demo", options={"max-num-seqs": 1, "max-model-len": 64}), 64 * GIB)
    assert few.kv_cache_bytes == MIN_KV_BYTES < found.kv_cache_bytes
    assert few.step_bytes < found.step_bytes
    assert estimate(entry, 1 * GIB).kv_cache_bytes == GIB // 8
    given = estimate(ModelEntry("a", "quire-demo", kv_cache_bytes=GIB, memory_bytes=5 * GIB), GIB)
    assert (given.kv_cache_bytes, given.size.needed_bytes) == (GIB, 5 * GIB)
    assert server_flags(entry, given, ServerConfig())["kv-cache-memory-bytes"] == GIB

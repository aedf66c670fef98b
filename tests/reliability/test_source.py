# SPDX-License-Identifier: Apache-2.0
"""Tests of constructs forbidden in the package's source; ruff's S rules (pyproject.toml) check the others."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config import ServerConfig

ROOT = Path(__file__).parents[2]
CODE_AS_DATA = {"pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve", "joblib"}
CLIENTS = {"urllib.request", "http.client", "requests", "httpx", "aiohttp", "urllib3", "ftplib", "smtplib"}
OUR_CLIENTS = ("quire/entrypoints/cli/", "quire/bench/")
"""Commands of a person who names the server."""
BUILT_INS = {"eval", "exec", "compile", "__import__"}
DYNAMIC_IMPORTS = {
    "quire/__init__.py", "quire/plugins.py", "quire/kernels/ops.py",
    "quire/kernels/attention_backends.py", "quire/entrypoints/cli/main.py", "quire/entrypoints/cli/run.py",
    "quire/engine/core_process.py", "quire/model_router/child_process.py", "quire/multimodal/door/video.py",
    "quire/speech/audio.py", "quire/speech/resampling.py", "quire/torch_import.py", "quire/vllm_names/imports.py",
}  # fmt: skip
"""What they import is named by the source or by the operator."""
TOOLS_OF_A_PERSON = {"quire/entrypoints/cli/run.py"}
"""`quire chat --tool FILE`, which is no server."""
REQUEST_PATHS = (
    "quire/entrypoints", "quire/engine", "quire/beam_search", "quire/lora/server", "quire/model_router",
    "quire/pooling/inputs.py",
    "quire/pooling/server", "quire/routing", "quire/sleep", "quire/supervision", "quire/sampling_params.py",
    "quire/pooling_params.py",
)  # fmt: skip
BOOKKEEPING = {
    "quire/entrypoints/openai/connection.py": "data.startswith(FIRST_BYTES[:num_sent])",
    "quire/entrypoints/openai/streaming.py": "len(self._around) > 1",
    "quire/entrypoints/openai/openapi/document.py": "not components.keys() & requests.keys()",
    "quire/engine/output_processor.py": "len(self.prompt_logprobs) <= self._num_prompt_tokens",
}
"""Asserts on the way of a request that state a number of our own, none of a request's."""


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Path, from the root -> syntax tree, of the package."""
    paths = sorted((ROOT / "quire").rglob("*.py"))
    gc.disable()  # millions of nodes, none of them garbage
    try:
        return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    finally:
        gc.freeze()
        gc.enable()


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(dotted(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def dotted(called: ast.expr) -> str:
    """Return a call's dotted name; a base that is no name is left out."""
    if isinstance(called, ast.Attribute):
        return f"{dotted(called.value)}.{called.attr}"
    return called.id if isinstance(called, ast.Name) else ""


@pytest.mark.item(60)
def test_data_is_never_code() -> None:
    for path, tree in modules().items():
        assert not set(imports(tree)) & CODE_AS_DATA, path
        found = [
            name for name, _ in calls(tree) if name in BUILT_INS or name.endswith(("torch.load", "yaml.load"))
        ]
        assert not found, path


@pytest.mark.item(60)
def test_tests_and_benchmarks_pickle_nothing_either() -> None:
    for folder in ("tests", "benchmarks", "demo_model"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if any(name in text for name in CODE_AS_DATA):  # to parse all of them takes seconds
                assert not set(imports(ast.parse(text))) & CODE_AS_DATA, path


@pytest.mark.item(19, 60)
def test_the_server_fetches_nothing() -> None:
    for path, tree in modules().items():
        if not path.startswith(OUR_CLIENTS):
            assert not set(imports(tree)) & CLIENTS, path


@pytest.mark.item(26, 60)
def test_code_of_a_checkpoint_is_never_run() -> None:
    for path, tree in modules().items():
        for name, call in calls(tree):
            trusted = [word for word in call.keywords if word.arg == "trust_remote_code"]
            assert all(ast.unparse(word.value) == "False" for word in trusted), path
            assert not name.endswith("import_module") or path in DYNAMIC_IMPORTS, path
            loads_file = name.endswith(("spec_from_file_location", "SourceFileLoader", "runpy.run_path"))
            assert not loads_file or path in TOOLS_OF_A_PERSON, path


@pytest.mark.item(60)
def test_no_assert_depends_on_a_request() -> None:
    """On its way an assert may state a type, which a type checker asks for, and never a value."""
    for path, tree in modules().items():
        if path.startswith(REQUEST_PATHS):
            for node in ast.walk(tree):
                if isinstance(node, ast.Assert):
                    claim = ast.unparse(node.test)
                    is_type = re.fullmatch(r"isinstance\(.*\)|[\w.]+ is not None", claim)
                    assert is_type or claim == BOOKKEEPING.get(path), f"{path}:{node.lineno}"


@pytest.mark.item(60)
def test_internal_sockets_have_no_tcp_form() -> None:
    for name in ("client", "core_process", "core_service", "messages"):
        assert "tcp" not in (ROOT / f"quire/engine/{name}.py").read_text(encoding="utf-8").lower()


@pytest.mark.item(60)
def test_server_binds_to_this_machine_by_default() -> None:
    assert ServerConfig().host == "127.0.0.1"


@pytest.mark.item(53)
def test_no_decision_hangs_on_the_time_of_day() -> None:
    """It is shown and stamped; waits, deadlines and ages are of the monotonic clock."""
    # Batches of KV events, spans of traces, the end of a lease in a reply, and files with times in the future, which a
    # wrong clock has made: by these times alone they would stay forever.
    stamps = (
        "quire/entrypoints/",
        "quire/pooling/server/",
        "quire/engine/core.py",
        "quire/kv_store/transfer_tier.py",
        "quire/kv_store/disk/namespaces.py",
        "quire/metrics/tracing.py",
        "quire/metrics/prometheus.py",
        "quire/speech/routes.py",
        "quire/speech/realtime_route.py",
        "quire/model_router/app.py",
    )
    for path, tree in modules().items():
        wall = [
            name for name, _ in calls(tree) if name in ("time.time", "datetime.now", "datetime.datetime.now")
        ]
        assert not wall or path.startswith(stamps), path

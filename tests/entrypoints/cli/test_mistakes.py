# SPDX-License-Identifier: Apache-2.0
"""Mistakes of newcomers: what each command answers, in one form (`error: ...`), and its exit code.

Exit code 2 means that the command, an option or a file of settings is wrong; 1 that the machine or the model does not
do what is asked.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from quire import SamplingParams
from quire.config import ASSETS
from quire.entrypoints.cli.main import main
from quire.errors import StartupError
from quire.worker.step_worker import enough_memory

DEMO = ASSETS / "quire-demo"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    root = tmp_path_factory.mktemp("mistakes")
    (root / "empty").mkdir()
    shutil.copytree(DEMO, root / "hub/snapshots/1")
    for name in ("bad_json", "no_tokenizer", "truncated", "no_weights", "unknown"):
        shutil.copytree(DEMO, root / name)
    (root / "bad_json/config.json").write_text("{ x")
    (root / "unknown/config.json").write_text('{"architectures": ["FooBarForCausalLM"]}')
    (root / "no_tokenizer/tokenizer.json").unlink()
    for path in (root / "no_weights").glob("*.safetensors"):
        path.unlink()
    (weights,) = (root / "truncated").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100_000])
    (root / "junk.gguf").write_bytes(b"junk" * 100)
    (root / "broken.jinja").write_text("{{ messages }}\n{% for %}")
    (root / "syntax.yaml").write_text("port: [1\n x")
    (root / "unknown.yaml").write_text("prot: 1\n")
    (root / "value.yaml").write_text("port: eight\n")
    (root / "keys.yaml").write_text("mine:\n  keys: [secret\n x")
    return root


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with these files; Hugging Face may not be asked."""
    monkeypatch.chdir(made)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return made


MISTAKES = (
    ("run hi --model ./no/such/dir", 1, "model './no/such/dir': there is no such directory; a model is a directory, a"),
    ("run hi --model ./llama.gguf", 1, "model './llama.gguf': there is no such file"),
    ("run hi --model quire-dem0", 1, "did you mean 'quire-demo'?"),
    ("run hi --model meta-llama/Llama-3.1-8B", 1, "is not on this machine, and HF_HUB_OFFLINE forbids to fetch it"),
    ("run hi --model unsloth/Llama-3.2-1B-GGUF:Q4_K_M", 1, "model 'unsloth/Llama-3.2-1B-GGUF:Q4_K_M' is not on"),
    ("run hi --model llama3.2:1b", 1, "model 'llama3.2:1b' is one of Ollama's names, which are not known here; give a"),
    ("run hi --model ./empty", 1, "empty/config.json: no such file; the directory has no files"),
    ("run hi --model ./hub", 1, "hub/config.json: no such file; a model is in {folder}/hub/snapshots/1"),
    ("run hi --model ./bad_json", 1, "bad_json/config.json: not valid JSON: Expecting property name"),
    ("run hi --model ./no_tokenizer", 1, "no_tokenizer has no tokenizer.json and no other file of a tokenizer; name"),
    ("run hi --model ./truncated", 1, "truncated: tensor 'model.embed_tokens.weight' ends at byte"),
    ("run hi --model ./no_weights", 1, "no_weights: no *.safetensors file"),
    ("run hi --model ./unknown", 1, "architecture 'FooBarForCausalLM' is not supported; of the"),
    ("run hi --model ./junk.gguf", 1, "junk.gguf: no GGUF file: it begins with b'junk', not b'GGUF'"),
    ("run hi --device gpu", 2, "'gpu' is not one of 'auto', 'cpu', 'cuda', 'xpu'"),
    ("run hi --dtype fp8", 2, "weights are rounded by --quantization fp8"),
    ("run hi --dtype bfloat15", 2, "did you mean 'bfloat16'?"),
    ("run hi --max-tokns 5", 2, "no such option '--max-tokns'. Did you mean '--max-tokens'?"),
    ("srve", 2, "no such command 'srve'. Did you mean 'serve'?"),
    ("run hi --max-model-len 100000", 2, "the model was made for 2048 positions; give at most that, or extend it by"),
    ("run hi --block-size 0", 2, "--block-size must be at least 1, got 0"),
    ("run hi --tensor-parallel-size 3", 2, "cannot be sharded evenly over so many ranks; possible: 1, 2"),
    ("serve --port {busy}", 1, "cannot listen on 127.0.0.1:{busy}: Address already in use; choose another --host or"),
    ("serve --host 203.0.113.7 --port 0", 1, "cannot listen on 203.0.113.7:0: Cannot assign requested address; choose"),
    ("serve --config syntax.yaml", 2, "--config syntax.yaml is not YAML: line 2, column 3: expected ',' or ']'"),
    ("serve --config unknown.yaml", 2, "unknown.yaml: unknown key 'prot'; did you mean 'port'?"),
    ("serve --config value.yaml", 2, "value.yaml: Invalid value for '--port': 'eight' is not an integer"),
    ("serve --config none.yaml", 2, "--config none.yaml: No such file or directory"),
    ("serve --port 0 --api-key-file keys.yaml", 2, "--api-key-file keys.yaml is not YAML: line 3, column 3"),
    ("serve --tool-call-parser hermess", 2, "got 'hermess'; did you mean 'hermes'?"),
    ("serve --reasoning-parser qwen4", 2, "got 'qwen4'; did you mean 'qwen3'?"),
    ("serve --chat-template ./none.jinja", 2, "--chat-template ./none.jinja is neither a readable file nor template"),
    ("serve --chat-template ./broken.jinja", 2, "--chat-template ./broken.jinja is not valid Jinja: line 2: "),
    ("serve --lora-modules a=./none", 2, "--lora-modules needs --enable-lora"),
    ("serve --enable-lora --lora-modules a=./none", 2, "--lora-modules: adapter 'a': there is no file "),
    ("serve --port 0 --otlp-traces-endpoint localhost:4317", 2, "must be a URL, such as http://localhost:4318/v1/tra"),
    ("chat -q hi --url http://127.0.0.1:9", 1, "[Errno 111] Connect call failed"),
    ("run-batch -i none.jsonl -o out.jsonl", 2, "could not open file 'none.jsonl': No such file or directory"),
    ("run-batch -i table.CSV -o out.csv", 2, "table.csv is a table, which needs --prompt TEMPLATE"),
    ("run {long} --max-model-len 64", 2, "this model's maximum context length is 64 tokens"),
)  # fmt: skip
"""Command, exit code, and a part of the message."""


@pytest.fixture(scope="module")
def busy() -> Iterator[int]:
    """A port that somebody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize(("command", "code", "words"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_mistake_is_one_sentence_with_an_exit_code(
    command: str, code: int, words: str, busy: int, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [part.format(busy=busy, long="word " * 200) for part in command.split()]
    assert main(argv) == code
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words.format(busy=busy, folder=folder).lower() in errors[0].lower()


def test_mistake_in_a_key_file_quotes_no_key(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--port", "0", "--api-key-file", "keys.yaml"])
    assert "secret" not in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_without_a_driver_names_the_build_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hi", "--device", "cuda"]) == 2
    assert f"--device cuda: torch {torch.__version__} finds no such device" in capfd.readouterr().err


def test_failed_allocation_hides_torchs_numbers() -> None:
    with (
        pytest.raises(
            StartupError, match=r"for a KV cache: the system refuses .*; give a smaller --kv-cache"
        ),
        enough_memory("a KV cache"),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_sampling_parameter_with_a_typo_is_suggested() -> None:
    with pytest.raises(TypeError, match=r"has no field 'tempreature'; did you mean 'temperature'\?"):
        SamplingParams(tempreature=1.0)  # type: ignore[call-arg]

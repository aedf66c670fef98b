# SPDX-License-Identifier: Apache-2.0
"""Every command and every snippet of the README and the docs is run; the heavy ones with smaller numbers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo_model.pictures import examples
from quire.entrypoints.cli.main import main
from quire.simulate.machine import write_machine
from tests.end_to_end.server import Server, free_port
from tests.fixtures.draft_heads import HEADS
from tests.simulate.machines import make_machine
from tests.speech.tiny import save_tiny_whisper

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "benchmarks/README.md", ROOT / "demo_model/README.md"]
SMALLER = (
    (r"--group-size 128", "--group-size 32"),  # tiny layers have 64 inputs
    (r"--output path/to/model-w4", "--output model-w4"),
    (r"serve path/to/model-w4", "serve path/to/model"),  # no command finds what another has written
    (r"--num-prompts \S+", "--num-prompts 2"),
    (r"--num-iters \S+", "--num-iters 1"),
    (r"--num-iters-warmup \S+", "--num-iters-warmup 0"),
    (r"--(random-)?(input|output)-len \S+", r"--\1\2-len 8"),
    (r"--request-rate \S+", "--request-rate 100"),
    (r"(prefix_cache.py \w+)", r"\1 --num-rounds 1 --num-warm-up-rounds 1"),
    (r"served.py", "served.py --num-rounds 1 --num-prompts 4"),
    (r"structured.py", "structured.py --num-rounds 1 --num-tokens 8"),
    (r"kv_waste.py", "kv_waste.py --num-requests 20"),
    (r"implementations.py", "implementations.py --rounds 1 --num-layers 1"),
    (r"benchmarks.adapters", "benchmarks.adapters benchmarks/models/dummy-0.5b --rounds 1"),
    (r"benchmarks.overhead", "benchmarks.overhead --requests 4"),
    (r"--shape minilm --load texts --num-texts 64", "--shape tiny --num-texts 2 --rounds 1"),
    (r"benchmarks.invariance --hidden 1024 --layers 8", "benchmarks.invariance --hidden 256 --layers 1"),
    (r"benchmarks.copied_text", "benchmarks.copied_text --num-tokens 16 --num-rounds 1"),
    (r"benchmarks.weight_update", "benchmarks.weight_update path/to/model --rounds 1"),
    (r"benchmarks.kv_store$", "benchmarks.kv_store --num-rows 20"),
    (r"(benchmarks.kv_store engines) \w+", r"\1 --help"),  # tests/benchmarks/test_kv_store.py runs them
    (r"quire (pull|rm) \S+", r"quire \1 --help"),  # which need Hugging Face, or a model in the cache
    (r"Once upon a time", "The capital of France is"),
)
"""The same command with less work, or about something that the included model knows."""
ROW_SERVER = "tcp://192.0.2.7:7070"
SERVERS = ("quire serve", "quire kv-store serve", "quire disagg-proxy")
CLIENTS = ("quire chat", "quire complete", "quire bench serve")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, of all pages."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [block for page in PAGES for block in fence.findall(page.read_text(encoding="utf-8"))]


def console_commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return sorted({line.removeprefix("$ ") for line in lines if line.startswith("$ ")})


def make_targets() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.MULTILINE)))


@pytest.fixture(scope="module")
def adapt(
    demo_server: Server, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Points a documented command at what the tests have."""
    config = tmp_path_factory.mktemp("docs") / "serve.yaml"
    (page,) = [block for block in blocks("yaml") if block.startswith("model:")]
    config.write_text(page.replace("path/to/model", str(tiny_model("llama"))))

    def adapted(command: str) -> str:
        for pattern, smaller in SMALLER:
            command = re.sub(pattern, smaller, command)
        command = command.replace("path/to/model", str(tiny_model("llama")))
        if "path/to/whisper" in command:
            whisper = save_tiny_whisper(tmp_path_factory.mktemp("docs") / "whisper")
            command = command.replace("path/to/whisper", str(whisper))
            command = command.replace("speech.wav", str(write_sound(config.parent / "speech.wav")))
        if "path/to/heads" in command:
            heads = HEADS["eagle3"].write(tmp_path_factory.mktemp("docs") / "heads")
            command = command.replace("path/to/heads", str(heads))
        command = command.replace("benchmarks/models/dummy-0.5b", str(tiny_model("qwen2")))
        command = command.replace("benchmarks/models/dummy-mamba2", f"{tiny_model('mamba2')} --quick")
        command = command.replace("--max-model-len 4K", "--max-model-len 128").replace(
            "--max-model-len 1K", ""
        )
        command = re.sub(r"http://localhost:800\d", demo_server.url, command)
        command = command.replace("--model-name mine", "--model-name quire-demo")
        command = command.replace("serve.yaml", str(config))
        command = command.replace("weather.py", str(write_tool(config.parent / "weather.py")))
        tables = write_tables(config.parent)
        command = re.sub(
            r"requests\.jsonl|countries\.(csv|parquet)|schema\.json", rf"{tables}/\g<0>", command
        )
        command = command.replace("path/to/rows", str(tmp_path_factory.mktemp("rows")))
        if "shapes.png" in command:
            command = command.replace("shapes.png", str(draw_shapes(config.parent / "shapes.png")))
        if command.startswith("quire trace"):
            command = command.replace("run.trace", str(record_run(config.parent / "run.trace")))
        if command.startswith("quire simulate run"):
            command = command.replace("machine.json", str(write_tiny_machine(config.parent)))
        if command.startswith(CLIENTS) and demo_server.url not in command:
            flag = "--base-url" if "bench" in command else "--url"
            command += f" {flag} {demo_server.url}{'' if 'bench' in command else '/v1'}"
        return command

    return adapted


def write_sound(path: Path) -> Path:
    """Write a second of noise, and return its path."""
    samples = np.random.default_rng(0).standard_normal(16_000) * 3000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.astype("<i2").tobytes())
    return path


def draw_shapes(path: Path) -> Path:
    """Draw a picture for the included model that sees, and return its path."""
    ((image, _),) = examples(0, 1)
    image.save(path)
    return path


def write_tiny_machine(directory: Path) -> Path:
    """Write a machine file with room for long prompts, and return its path."""
    path = directory / "machine.json"
    changes = {"max_model_len": 2048, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 2000}
    write_machine(make_machine(**changes), path)
    return path


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, input="Hello\n", capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def quire(arguments: list[str], cwd: Path, stdin: str = "Hello\n") -> str:
    """Run a command in this process, to save Python's start, and return its output."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(arguments)
    assert code == 0, f"quire {shlex.join(arguments)}\n{out.getvalue()}\n{errors.getvalue()}"
    return out.getvalue()


def batch_line() -> str:
    """A request for the command that answers them."""
    body = {"prompt": "Hello", "max_tokens": 4}
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def write_tables(folder: Path) -> Path:
    """Requests, tables and a schema for batch jobs."""
    (folder / "requests.jsonl").write_text(batch_line())
    (folder / "countries.csv").write_text("country\nFrance\nJapan\n")
    pq.write_table(pa.table({"country": ["France", "Japan"]}), folder / "countries.parquet")
    (folder / "schema.json").write_text('{"enum": ["Paris", "Tokyo"]}')
    return folder


def write_tool(file: Path) -> Path:
    """The documented function for the command that lets a model call it."""
    (block,) = [block for block in blocks("py") if block.startswith("def get_weather")]
    file.write_text(block)
    return file


def record_run(file: Path) -> Path:
    """A recorded run for the commands that read one."""
    quire(["run", "Hello", "--max-tokens", "4", "--record-trace", str(file)], file.parent)
    return file


@pytest.mark.more
@pytest.mark.parametrize("command", [c for c in console_commands() if not c.startswith(SERVERS)])
def test_console_command(command: str, adapt: Callable[[str], str], tmp_path: Path) -> None:
    if "ray_data" in command:
        pytest.importorskip("ray")
    name, *arguments = shlex.split(adapt(command))
    assert name in ("quire", "python", "torchrun"), "an unknown kind of command: teach this test to run it"
    if name == "torchrun":
        output = run([sys.executable, "-m", "torch.distributed.run", *arguments], ROOT)
    elif name == "python":
        script, *options = arguments
        of_package = script == "-m"
        where = ROOT if of_package else tmp_path
        output = run([sys.executable, script if of_package else str(ROOT / script), *options], where)
    else:
        output = quire(arguments, tmp_path, batch_line() if "run-batch" in arguments else "Hello\n")
    if "run-batch" in arguments:
        output = (tmp_path / arguments[arguments.index("-o") + 1]).read_bytes().decode(errors="replace")
    assert output.strip()


@pytest.mark.more
@pytest.mark.parametrize(
    "command", [c for c in console_commands() if c.startswith("quire serve") and ROW_SERVER not in c]
)
def test_serve_command(command: str, adapt: Callable[[str], str], tmp_path: Path) -> None:
    arguments = shlex.split(re.sub(r"--port \d+", "", adapt(command)))[2:]
    server = Server(*arguments, log=tmp_path / "log").wait_ready()
    assert server.stop() == 0, server.log.read_text()


def test_proxy_command(tmp_path: Path) -> None:
    (command,) = [command for command in console_commands() if command.startswith("quire disagg-proxy")]
    port, log = free_port(), tmp_path / "log"
    arguments = [*shlex.split(command)[1:], "--port", str(port)]
    with log.open("w") as file:
        proxy = subprocess.Popen(
            [sys.executable, "-m", "quire.entrypoints.cli.main", *arguments], stderr=file
        )
    try:
        while (found := _health_of(port)) is None:
            assert proxy.poll() is None, log.read_text()
            time.sleep(0.05)
        assert set(found) == {"prefill", "decode", "num_requests", "counts"}
    finally:
        proxy.terminate()
    assert proxy.wait(60) == 0, log.read_text()


def _health_of(port: int) -> dict[str, object] | None:
    """The proxy's account of its engines, which do not run here; None while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as reply:
            return dict(json.load(reply))
    except urllib.error.HTTPError as error:
        return dict(json.load(error))
    except OSError:
        return None


@pytest.mark.more
def test_row_server_commands(adapt: Callable[[str], str], tmp_path: Path) -> None:
    """A row server of each documented address, and an engine that uses the one with a key."""
    key, log = tmp_path / "key", tmp_path / "rows.log"
    key.write_text("0f" * 32)
    served = [command for command in console_commands() if command.startswith("quire kv-store serve")]
    assert len(served) == 2
    (engine,) = [c for c in console_commands() if c.startswith("quire serve") and ROW_SERVER in c]
    for command in served:
        command = command.replace("path/to/key", str(key)).replace(ROW_SERVER, "tcp://127.0.0.1:0")
        command = re.sub(r"unix:\S+", f"unix:{tmp_path}/s", command)
        with log.open("w") as file:
            rows = subprocess.Popen(
                [sys.executable, "-m", "quire.entrypoints.cli.main", *shlex.split(command)[1:]], stderr=file
            )
        try:
            while not (found := re.search(r"listens at (\S+)", log.read_text())):
                assert rows.poll() is None, log.read_text()
                time.sleep(0.05)
            if "--key-file" in command:
                command = engine.replace(ROW_SERVER, found[1]).replace("path/to/key", str(key))
                server = Server(*shlex.split(adapt(command))[2:], log=tmp_path / "log").wait_ready()
                assert server.stop() == 0, server.log.read_text()
        finally:
            rows.terminate()
        assert rows.wait(60) == 0, log.read_text()


@pytest.mark.more
@pytest.mark.parametrize("block", [block for block in blocks("sh") if block.startswith("curl")])
def test_curl(block: str, adapt: Callable[[str], str], tmp_path: Path) -> None:
    if "image_url" in block:
        server = Server("quire-demo-vision", log=tmp_path / "log").wait_ready()
        try:
            reply = run(["sh", "-c", adapt(block.replace("http://localhost:8000", server.url))], tmp_path)
        finally:
            server.stop()
        assert '"finish_reason":"stop"' in reply
        return
    assert re.search(
        '"finish_reason":"(stop|tool_calls)"|"stop_type":"eos"', run(["sh", "-c", adapt(block)], tmp_path)
    )


@pytest.mark.more
@pytest.mark.parametrize("block", blocks("python"))
def test_python_snippet(block: str, adapt: Callable[[str], str], tmp_path: Path) -> None:
    assert run([sys.executable, "-c", adapt(block)], tmp_path).strip()


@pytest.mark.parametrize("target", make_targets())
def test_make_target(target: str) -> None:
    """A dry run, since this test is itself run by make."""
    run(["make", "--dry-run", target], ROOT)


def test_functions_in_the_life_of_a_request_exist() -> None:
    page = (ROOT / "docs/life_of_a_request.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w/.]+)` \|", page, flags=re.MULTILINE)
    assert len(rows) == 14
    for name, path in rows:
        source = (ROOT / path).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", source), f"{name} is not in {path}"


def test_files_in_the_design_define_their_names() -> None:
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ●? ?\| `(quire/[\w/.]+)` \| `(\w+)` \|", page, flags=re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| ●? ?\| `", page, flags=re.MULTILINE)) > 50
    for path, name in rows:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async def|def|class) {name}\b", source, re.MULTILINE), (
            f"{name} is not in {path}"
        )


def test_tree_in_the_design_names_every_package() -> None:
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    tree = page.split("## 1. The tree")[1].split("```")[1]
    listed = re.findall(r"^(quire/[\w/]*)  *\S", tree, flags=re.MULTILINE)
    folders = {file.parent.relative_to(ROOT).as_posix() + "/" for file in (ROOT / "quire").rglob("*.py")}
    assert sorted(listed) == sorted(folders | {"quire/assets/"})


@pytest.mark.parametrize("page", ["design", "internals", "life_of_a_request"])
def test_paths_in_pages_about_the_code_exist(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:quire|csrc|tests|demo_model)/[\w/.]+)`", text))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []

# SPDX-License-Identifier: Apache-2.0
"""Every program in examples/ runs and prints the output of its page."""

from __future__ import annotations

import gc
import json
import re
import runpy
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.end_to_end.server import Server
from tests.fixtures.gguf_models import write_demo
from tests.fixtures.hearing_models import make_hearing
from tests.fixtures.seeing_models import make_seeing
from tests.multimodal.test_whole import OPTIONS, write_tokenizer
from tests.speech.tiny import save_tiny_whisper

EXAMPLES = Path(__file__).parents[2] / "examples"


class Run(NamedTuple):
    """A way to run an example, and an expression that its output matches."""

    file: str
    expected: str
    arguments: tuple[str, ...] = ()


OFFLINE = (
    Run("basic.py", "The capital of France is Paris"),
    Run("chat.py", r"Rome[\s\S]*42"),
    Run("async_streaming.py", "request 1: .*Tokyo"),
    Run("pydantic_output.py", r"Person\(name='Peter', age=36, city='Paris'\)"),
    Run("choices.py", r"France\? yes"),
    Run("speculation.py", r"same tokens: True\n.*: [1-9]\d* of"),
    Run("prefix_caching.py", r" 0 of [\s\S]*400 of"),
    Run("logits_processor.py", "plain: +' Paris.'\nchanged: (?!' Paris)"),
    Run("beam_search.py", r"^ *-0\.\d\d .*Paris"),
    Run("lora.py", "pirate .*Paris", ("What is the capital of France?",)),
    Run("search.py", "spider has 8 legs.$"),
)
IN_PROCESSES = (
    Run("quantize_and_serve.py", r"MiB[\s\S]*Paris"),
    Run("batch_resume.py", "France -> .*Paris.*\n.*Tokyo.*\n.*Rome"),
)
"""Examples that start commands, each of which imports torch again."""
CHAT = (
    Run("openai_chat.py", r"whole: .*Paris[\s\S]*streamed: .*Paris[\s\S]*42[\s\S]*9"),
    Run("openai_tools.py", r'streamed: get_weather \{"city": ?"Paris"\}\nforced:   tool_calls'),
    Run("agent_loop.py", r"get_weather\(.*18[\s\S]*18 degrees"),
    Run("reasoning.py", r"reasoning: \w[\s\S]*answer: .*9[\s\S]*streamed: .*'content': '.*9"),
    Run("anthropic_client.py", r"Paris.*\n.*Paris.*\n\d+ tokens"),
    Run("ollama_client.py", r"models: quire-demo\S*\n.*Paris"),
    Run("monitoring/metrics.py", r"quire:kv_cache_usage_perc [\d.]+\n.* ms"),
)
EMBEDDING = (Run("embeddings.py", r"^0\.\d\d  A young cow"), Run("rerank.py", r"^0\.\d\d  A young cow"))
WITH_FILES = ("gguf.py", "images.py", "sounds.py", "transcription.py")
ELSEWHERE = {
    "ray_data.py": "tests/batch/test_ray_data.py",
    "torchrun.py": "tests/end_to_end/test_documented_commands.py",
    "rag_langchain.py": "tests/clients/openai_3/test_rag.py",
    "rag_llamaindex.py": "tests/clients/openai_2/test_rag.py",
}
"""Examples that need what is not in this environment -> the test that runs them."""
TEMPLATE = """{% for part in messages[0].content %}{% if part.type == "image" %}<image> {% else %}{{ part.text }}
{% endif %}{% endfor %}"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example in this process, which has imported torch already, and return what it prints."""

    def run(file: str, *arguments: str, url: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [file, *arguments])
        monkeypatch.setenv("QUIRE_URL", url)
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / file), run_name="__main__")
        gc.collect()  # engines of the program, as at the end of a process
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("example", OFFLINE, ids=lambda example: example.file)
def test_offline_example_prints_its_answer(example: Run, run: Callable[..., str]) -> None:
    assert re.search(example.expected, run(example.file, *example.arguments))


@pytest.mark.more
@pytest.mark.parametrize("example", IN_PROCESSES, ids=lambda example: example.file)
def test_example_of_commands_prints_its_answer(example: Run, run: Callable[..., str]) -> None:
    assert re.search(example.expected, run(example.file))


@pytest.mark.parametrize("example", CHAT, ids=lambda example: example.file)
def test_client_example_prints_its_answer(example: Run, run: Callable[..., str], demo_server: Server) -> None:
    assert re.search(example.expected, run(example.file, url=demo_server.url))


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server("quire-demo-embed", log=tmp_path_factory.mktemp("embed") / "log").wait_ready()
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.mark.parametrize("example", EMBEDDING, ids=lambda example: example.file)
def test_pooling_example_ranks_the_right_fact_first(
    example: Run, run: Callable[..., str], embedding_server: Server
) -> None:
    assert re.search(example.expected, run(example.file, url=embedding_server.url))


def test_gguf_example_answers(run: Callable[..., str], tmp_path: Path) -> None:
    model, _ = write_demo(tmp_path)
    assert "Paris" in run("gguf.py", str(model), "What is the capital of France?")


def test_images_example_answers(run: Callable[..., str], tmp_path: Path) -> None:
    make_seeing("llava", tmp_path)
    write_tokenizer(tmp_path)
    image = {"image_processor_type": "CLIPImageProcessor", **OPTIONS}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    assert run("images.py", str(tmp_path), str(tmp_path / "red.png"), "t1 t2").strip()


def write_noise(sound: Path) -> None:
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((np.random.default_rng(0).standard_normal(16_000) * 3000).astype("<i2").tobytes())


def test_sounds_example_answers(run: Callable[..., str], tmp_path: Path) -> None:
    make_hearing("qwen2-audio", tmp_path)
    write_noise(tmp_path / "noise.wav")
    assert run("sounds.py", str(tmp_path), str(tmp_path / "noise.wav"), "t5 t6").strip()


def test_transcription_example_writes_segments(run: Callable[..., str], tmp_path: Path) -> None:
    model, sound = save_tiny_whisper(tmp_path / "model"), tmp_path / "speech.wav"
    write_noise(sound)
    assert str(sound) in run("transcription.py", str(model), str(sound))


def test_prometheus_example_scrapes_a_server() -> None:
    (job,) = yaml.safe_load((EXAMPLES / "monitoring/prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:8000"]}]


def test_examples_are_all_run_and_all_listed() -> None:
    files = {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.py")}
    programs = {file for file in files if not file.startswith("plugins/")}
    tested = {run.file for run in (*OFFLINE, *IN_PROCESSES, *CHAT, *EMBEDDING)} | {*WITH_FILES} | {*ELSEWHERE}
    assert programs == tested
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/.]+)\)", page))
    assert programs <= linked
    assert all((EXAMPLES / target).exists() for target in linked)

# SPDX-License-Identifier: Apache-2.0
"""`quire run` on a tiny model: what it prints is what `LLM` generates."""

from __future__ import annotations

import io
import re
import shutil
import sys
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.cli.main import main
from quire.entrypoints.llm import LLM
from quire.kernels import cpu
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from tests.fixtures.hearing_models import RATE, make_hearing, sound

ENGINE = ["--cpu-threads", "1"]
GREEDY = ["--temperature", "0", "--max-tokens", "12"]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> str:
    return str(tiny_model("llama"))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, cpu_threads=1)


def test_chat_model_gets_the_prompt_as_a_user_message(
    model: str, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "hello", "--model", model, "--system-prompt", "be kind", *ENGINE, *GREEDY]) == 0
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert capsys.readouterr().out == expected.outputs[0].text + "\n"


def test_reasoning_is_separated_as_by_llm_chat(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    thinker = tmp_path / "thinker"
    shutil.copytree(model, thinker)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}<think>"
    (thinker / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_, **__: False)
    assert main(["run", "hello", "--model", str(thinker), *ENGINE, *GREEDY]) == 0
    params = SamplingParams(temperature=0, max_tokens=12)
    chat = [{"role": "user", "content": "hello"}]
    (output,) = LLM(str(thinker), cpu_threads=1).chat(chat, params, use_tqdm=False)
    answer = output.outputs[0].answer
    assert answer is not None
    assert answer.reasoning.strip()
    shown = capsys.readouterr().out
    assert "\x1b[2m" in shown
    assert shown.replace("\x1b[2m", "").replace("\x1b[0m", "") == answer.reasoning + "\n"


def test_raw_text_from_standard_input(
    model: str, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("once upon"))
    assert main(["run", "-", "--raw", "--model", model, *ENGINE, *GREEDY, "--ignore-eos"]) == 0
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (expected,) = llm.generate("once upon", params, use_tqdm=False)
    assert capsys.readouterr().out == expected.outputs[0].text + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "standard input is empty; give a PROMPT"),
        (b" \n", "standard input is empty; give a PROMPT"),
        (b"caf\xe9", "standard input is not utf-8 text, by its byte 3"),
    ],
    ids=["closed", "empty", "latin-1"],
)
def test_standard_input_without_a_prompt_is_a_mistake(
    content: bytes | None, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = None
    if content is not None:
        stdin = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["run"]) == 2
    assert message in capsys.readouterr().err


def test_seed_decides(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("3", "3", "4"):
        assert main(["run", "hello", "--model", model, "--max-tokens", "16", "--seed", seed, *ENGINE]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--raw", "--system-prompt", "x"], 2, "--system-prompt needs a chat template; drop --raw"),
        (["--skip-tokenizer-init"], 2, "drop --skip-tokenizer-init"),
        (["--temperature", "9"], 2, "temperature must be finite and in [0, 2]"),
        (["--max-tokens", "0"], 2, "max_tokens must be at least 1"),
        (["--model", "/no/such/model"], 1, "'/no/such/model'"),
    ],
)
def test_mistakes_are_one_sentence(
    model: str, flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "hello", "--model", model, *ENGINE, *flags]) == code
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert captured.out == ""


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--regex", "[0-9]{3}"], r"\d{3}"),
        (["--choice", "yes", "--choice", "no"], "yes|no"),
        (["--json-schema", '{"enum": [1, "a"]}'], '1|"a"'),
        (["--json-schema", "@SCHEMA"], "true|false"),
    ],
    ids=["regex", "choice", "schema", "file"],
)
def test_an_answer_has_the_form_that_it_is_given(
    model: str, options: list[str], pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "boolean"}')
    options = [option.replace("SCHEMA", str(tmp_path / "schema.json")) for option in options]
    assert main(["run", "hello", "--model", model, *ENGINE, "--max-tokens", "20", *options]) == 0
    assert re.fullmatch(pattern, capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    "options", [["--regex", "a", "--choice", "b"], ["--json-schema", "{"], ["--json-schema", "@no"]]
)
def test_invalid_answer_form_is_a_usage_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run", "hello"], ["complete"], ["chat"]):
        assert main([*command, *options]) == 2
        assert "--json-schema" in capsys.readouterr().err


@pytest.mark.skipif(not cpu.available(), reason="no kernels, no rounds")
def test_run_streams_a_token_per_step_by_default(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, num_steps = LLMEngine.step, 0

    def counted(engine: LLMEngine) -> list[RequestOutput]:
        nonlocal num_steps
        num_steps += 1
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", counted)
    command = ["run", "hello", "--model", model, "--ignore-eos", *ENGINE, *GREEDY]
    command += ["--max-multi-step-s", "1000"]
    assert main(command) == 0
    assert num_steps >= 12
    num_steps = 0
    assert main([*command, "--num-scheduler-steps", "16"]) == 0
    assert num_steps < 6


def test_sound_file_is_sent_to_a_sound_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "hears")
    make_hearing("qwen2-audio", Path(model))
    files = [str(tmp_path / f"{number}.wav") for number in range(2)]
    for number, path in enumerate(files):
        with wave.open(path, "wb") as writer:
            writer.setparams((1, 2, RATE, 0, "NONE", ""))
            writer.writeframes(np.round(sound(8000, number) * 32768).astype("<i2").tobytes())
    options = ["--model", model, "--dtype", "float32", "--ignore-eos", *ENGINE, "--seed", "3"]
    options += ["--temperature", "1", "--max-tokens", "12"]
    printed = []
    for path in files:
        assert main(["run", "hello", "--audio", path, *options]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]
    samples, rate = np.round(sound(8000, 0) * 32768).astype(np.float32) / 32768, RATE
    parts = [{"type": "audio", "audio": (samples, rate)}, {"type": "text", "text": "hello"}]
    llm = LLM(model, cpu_threads=1, dtype="float32", seed=3)
    params = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True)
    (expected,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    llm.shutdown()
    assert len(printed[0]) > 3
    assert printed[0] == expected.outputs[0].text + "\n"
    assert main(["run", "hello", "--audio", files[0], "--raw", *options]) == 2
    assert "--audio needs a chat template" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""The package in examples/plugins/model, installed by pip and served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.end_to_end.server import Server
from tests.fixtures.tiny_models import write_tiny_model

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugins" / "model"
PROGRAM = """
import json, sys
from quire import LLM, SamplingParams

llm = LLM(sys.argv[1], max_model_len=32, device="cpu")
params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
(output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
(sample,) = output.outputs
print("said", json.dumps([sample.token_ids, [next(iter(at.values())).logprob for at in sample.logprobs]]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip has installed the example; its tools are those of the tests' own environment."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    sources = shutil.copytree(
        EXAMPLE, tmp_path_factory.mktemp("sources") / "model"
    )  # building writes beside them
    subprocess.run([*command, "--target", str(site), str(sources)], check=True, timeout=120)
    return site


def checkpoint(architecture: str, directory: Path) -> Path:
    """A tiny Llama under an architecture's name, at a temperature of 2."""
    model = write_tiny_model("llama", directory)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": [architecture], "temperature": 2.0})
    )
    return model


def import_path(site: Path) -> str:
    """For processes that find what pip has installed there."""
    paths = [str(site), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.pathsep.join(paths)


def said(site: Path, model: Path) -> tuple[list[int], list[float]]:
    """Greedy tokens of a checkpoint and their logprobs, by `LLM`."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env=os.environ | {"PYTHONPATH": import_path(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("said ")] or [done.stderr]
    tokens, logprobs = json.loads(line.removeprefix("said "))
    return tokens, logprobs


def served(site: Path, model: Path, log: Path) -> tuple[list[int], list[float]]:
    """The same by `quire serve`, over HTTP."""
    limits = ("--max-model-len", "32", "--device", "cpu")
    server = Server(str(model), *limits, log=log, PYTHONPATH=import_path(site)).wait_ready()
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    asked = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked) as reply:
        (choice,) = json.load(reply)["choices"]
    assert server.stop() == 0, server.log.read_text()
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.more
def test_the_example_serves_its_architecture(site: Path, tmp_path: Path) -> None:
    warm_model = checkpoint("WarmLlamaForCausalLM", tmp_path / "warm")
    cool_tokens, cool = said(site, checkpoint("LlamaForCausalLM", tmp_path / "llama"))
    warm_tokens, warm = said(site, warm_model)
    assert warm_tokens == cool_tokens, "dividing by a number moves no maximum"
    assert all(one < other for one, other in zip(warm, cool, strict=True)), "and makes it less likely"
    tokens, logprobs = served(site, warm_model, tmp_path / "log")
    assert tokens == warm_tokens
    assert logprobs == pytest.approx(warm, abs=1e-6)

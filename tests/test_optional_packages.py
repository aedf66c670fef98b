# SPDX-License-Identifier: Apache-2.0
"""Test without optional packages: an engine generates and a server's modules import where none can be imported."""

import subprocess
import sys

ABSENT = (
    "triton",
    "transformers",
    "xgrammar",
    "ray",
    "opentelemetry.sdk",
    "safetensors",
    "gguf",
    "cryptography",
    "scipy",
    "PIL",
    "pyarrow",
)
GENERATES = """
from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes"]))
assert LLM(device="cpu").generate("Is it?", params)[0].outputs[0].text == "yes"
"""
EMBEDS = """
from quire import LLM

assert len(LLM("quire-demo-embed", device="cpu").embed("Hello")[0].outputs.embedding)
"""
SERVES = (
    "import quire.entrypoints.cli.main, quire.entrypoints.openai.api_server, "
    "quire.entrypoints.cli.run_batch, quire.batch.rows"
)
RANKS = "import quire.engine.core_process, quire.executor.ranks.multiproc, quire.executor.ranks.rank_process"


def test_nothing_is_imported_that_a_plain_install_lacks() -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))"
    program = "\n".join((blocked, SERVES, RANKS, GENERATES, EMBEDS))
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

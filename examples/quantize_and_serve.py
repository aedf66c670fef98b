# SPDX-License-Identifier: Apache-2.0
"""Write a 4-bit checkpoint of a model, and run it.

python examples/quantize_and_serve.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from quire import LLM, SamplingParams

QUIRE = [sys.executable, "-m", "quire.entrypoints.cli.main"]  # the command `quire`


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "quire-demo"
    folder = Path(tempfile.mkdtemp()) / "w4"
    # rtn needs no texts; gptq and awq are more accurate and read a few thousand tokens (--calibration).
    options = ["--method", "rtn", "--bits", "4", "--group-size", "32", "--output", str(folder)]
    subprocess.run([*QUIRE, "quantize", model, *options], check=True)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"{size / 2**20:.1f} MiB of weights")

    llm = LLM(str(folder))  # `quire serve FOLDER` reads it the same way
    params = SamplingParams(temperature=0.0, max_tokens=32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    print(llm.chat([chat], params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()

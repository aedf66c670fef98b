# SPDX-License-Identifier: Apache-2.0
"""Run a GGUF file: weights, tokenizer and chat template are in it.

python examples/gguf.py path/to/model.gguf "What is the capital of France?"
python examples/gguf.py Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M "What is the capital of France?"
"""

import sys

from quire import LLM, SamplingParams


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit("give a GGUF file, or owner/name:QUANTIZATION of Hugging Face")
    question = " ".join(sys.argv[2:]) or "What is the capital of France?"
    llm = LLM(sys.argv[1], max_model_len=512)
    params = SamplingParams(temperature=0.0, max_tokens=64)
    (output,) = llm.chat([[{"role": "user", "content": question}]], params, use_tqdm=False)
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()

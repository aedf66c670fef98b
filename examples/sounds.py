# SPDX-License-Identifier: Apache-2.0
"""Ask a model that hears about a sound file.

pip install 'quire-llm[vision,audio]'
python examples/sounds.py path/to/model sound.wav "What is said?"
"""

import sys

from quire import LLM, SamplingParams


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit("give a model that takes sounds (docs/multimodal.md) and a sound file")
    model, sound, *words = sys.argv[1:]
    content = [
        {"type": "audio", "audio": sound},
        {"type": "text", "text": " ".join(words) or "What is said?"},
    ]
    llm = LLM(model)
    params = SamplingParams(temperature=0.0, max_tokens=64)
    (output,) = llm.chat([[{"role": "user", "content": content}]], params, use_tqdm=False)
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()

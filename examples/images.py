# SPDX-License-Identifier: Apache-2.0
"""Ask a vision-language model about a picture.

pip install 'quire-llm[vision]'
python examples/images.py path/to/model picture.png "What is in the picture?"
"""

import sys

from PIL import Image

from quire import LLM, SamplingParams


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit("give a model that takes images (docs/multimodal.md) and a picture")
    model, picture, *words = sys.argv[1:]
    content = [
        {"type": "image_pil", "image_pil": Image.open(picture)},
        {"type": "text", "text": " ".join(words) or "What is in the picture?"},
    ]
    llm = LLM(model)
    params = SamplingParams(temperature=0.0, max_tokens=64)
    (output,) = llm.chat([[{"role": "user", "content": content}]], params, use_tqdm=False)
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()

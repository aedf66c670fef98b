# SPDX-License-Identifier: Apache-2.0
"""Engines for `bench throughput` and `bench latency`.

Invariant: every backend gets the same token-id prompts and generates exactly `output_len` tokens for each, greedily
and past any end-of-sequence token, so times compare the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.progress import Progress
from quire.sampling_params import RequestOutputKind, SamplingParams

Prompts = Sequence[list[int]]


class Backend(Protocol):
    """Engine with a loaded model."""

    name: str
    vocab_size: int

    def generate(self, prompts: Prompts, output_len: int) -> list[list[int]]:
        """Return the generated tokens of each prompt, in order."""
        ...


class QuireBackend:
    """Offline engine of quire."""

    name = "quire"

    def __init__(self, config: EngineConfig) -> None:
        from quire.engine.llm_engine import LLMEngine

        self._engine = LLMEngine(config)
        self.arch = self._engine.config.arch
        self.vocab_size = self.arch.vocab_size

    def generate(self, prompts: Prompts, output_len: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for number, prompt in enumerate(prompts):
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        generated: dict[str, list[int]] = {}
        progress = Progress(len(prompts), "Benchmark", "prompts", ends=False)
        while self._engine.has_unfinished_requests():
            finished = {output.request_id: output.outputs[0].token_ids for output in self._engine.step()}
            generated |= finished
            if finished:
                progress.update(len(finished))
        progress.close()
        return [generated[str(number)] for number in range(len(prompts))]


class TransformersBackend:
    """Hugging Face transformers: one float32 batch of equally long prompts."""

    name = "hf"

    def __init__(self, config: EngineConfig) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from quire.models.checkpoint import resolve_model_dir

        if config.device.cpu_threads:
            torch.set_num_threads(config.device.cpu_threads)
        directory = resolve_model_dir(config.model.model, config.model.revision, config.load.download_dir)
        hf_config = AutoConfig.from_pretrained(directory)
        factory: Any = AutoModelForCausalLM
        if config.load.load_format == "dummy":
            self._model = factory.from_config(hf_config, dtype=torch.float32)
        else:
            self._model = factory.from_pretrained(directory, dtype=torch.float32)
        self._model.eval()
        self._model.generation_config.eos_token_id = None
        self.vocab_size: int = hf_config.vocab_size

    def generate(self, prompts: Prompts, output_len: int) -> list[list[int]]:
        import torch

        ids = torch.tensor(list(prompts))
        mask = torch.ones_like(ids)
        out = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=output_len, do_sample=False, pad_token_id=0
        )
        generated: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return generated


BACKENDS: dict[str, Callable[[EngineConfig], Backend]] = {
    QuireBackend.name: QuireBackend,
    TransformersBackend.name: TransformersBackend,
}
"""Name -> factory that loads the model."""

# SPDX-License-Identifier: Apache-2.0
"""`LLM`: offline generation, pooling, beam search and transcription."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.adapters import LoRARequest
from quire.engine.tokenizer import Tokenizer
from quire.entrypoints.offline import as_prompts, per_prompt
from quire.entrypoints.offline_llm import Adapters, OfflineLLM
from quire.errors import EngineError, ValidationError
from quire.inputs import PromptType
from quire.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from quire.sampling_params import BeamSearchParams

if TYPE_CHECKING:
    from quire.speech.offline import Audio, OfflineSpeech
    from quire.speech.requests import Ask
    from quire.speech.transcript import Transcription


class LLM(OfflineLLM):
    """A model loaded for offline use.

    Args:
        model: local directory, GGUF file, Hugging Face id (for GGUF owner/name:Q4_K_M), or the bundled demo model.
        tool_call_parser, reasoning_parser: answer formats; "auto" selects them by the chat template.
        engine_args: any field of the engine's configuration, for example `max_model_len=2048` or `seed=1`; a value of
            the form "module:Class" may also be the class itself.

    Raises:
        TypeError: an argument is not a configuration field.
        StartupError: the engine cannot start; the message gives the reason.
    """

    _speech: OfflineSpeech | None = None

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams | None = None,
        lora_request: Adapters = None,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` best sequences of each prompt, best first.

        Args:
            params: None: those of the generation config of an encoder-decoder checkpoint.
            concurrency_limit: maximum number of prompts searched at once; None: all.

        Raises:
            ValidationError: a prompt or a parameter is invalid; nothing was searched.
            EngineError: a search failed.
        """
        params = self.llm_engine.input_processor.beam_search_params(params)
        all_prompts = list(map(self._with_media, as_prompts(prompts)))
        size = concurrency_limit or max(len(all_prompts), 1)
        if size < 0:
            raise ValidationError(
                f"concurrency_limit must be positive, got {size}", param="concurrency_limit"
            )
        pairs = list(zip(all_prompts, per_prompt("lora_request", lora_request, all_prompts), strict=True))
        parts = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        outputs = [one for part in parts for one in self._search(part, params, use_tqdm)]
        tokenizers, part_of = self.llm_engine.input_processor.tokenizers, self.llm_engine.config.arch.part_of
        has_encoder = part_of is not None and part_of.is_prompted
        return [
            beam_search_output(output, tokenizers.of(adapter).tokenizer, params, has_encoder=has_encoder)
            for output, (_, adapter) in zip(outputs, pairs, strict=True)
        ]

    def _search(
        self, prompts: list[tuple[PromptType, LoRARequest | None]], params: BeamSearchParams, use_tqdm: bool
    ) -> list[RequestOutput]:
        with self._one_thread, self._abort_on_error() as requests:
            for prompt, adapter in prompts:
                request_id = self._request_id()
                self.llm_engine.add_request(request_id, prompt, params, lora_request=adapter)
                requests.append(request_id)
            return self._run(requests, use_tqdm)

    def transcribe(
        self,
        audio: Audio | Sequence[Audio],
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str = "",
        temperature: float | Sequence[float] | None = None,
        timestamps: bool = True,
        words: bool = False,
        hotwords: str = "",
        vad_filter: bool = False,
        seed: int | None = None,
        use_tqdm: bool = True,
        beam_size: int = 1,
    ) -> list[Transcription]:
        """Transcribe sounds with a Whisper model; return one transcription per sound, in order.

        Args:
            audio: one or several of: a path, or samples [T] or [T, channels] with their number per second.
            language: code or name; None: detected.
            task: "transcribe", or "translate" to English.
            prompt: text that precedes the sound, for its names and style.
            temperature: one, or several to try in order; None: 0, 0.2 ... 1.0.
            timestamps: return segments with times; without, each window of 30 s is one segment.
            words: give segments their words with times.
            hotwords: words that are likely in the sounds.
            vad_filter: transcribe only windows with a voice, by silero-vad's weights.
            beam_size: beams of a search at temperature 0; 1: the likeliest token each time.

        Raises:
            ValidationError: the model does not transcribe, or a sound or an argument is invalid.
        """
        wants = {"timestamps": timestamps, "words": words, "vad_filter": vad_filter, "beam_size": beam_size}
        from quire.speech.offline import OfflineSpeech, options_of

        options = options_of(language, task, prompt, temperature, hotwords=hotwords, seed=seed, **wants)
        sounds = [audio] if isinstance(audio, str | Path | tuple) else list(audio)
        if self._speech is None:
            self._speech = OfflineSpeech(self.llm_engine, self.get_tokenizer(), self._answer_asks)
        return self._speech.transcribe(sounds, options, use_tqdm)

    def _answer_asks(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        with self._one_thread, self._abort_on_error() as requests:
            for ask in asks:
                request_id = self._request_id()
                self.llm_engine.add_request(request_id, ask.prompt, ask.params)
                requests.append(request_id)
            return self._run(requests, False)

    def shutdown(self) -> None:
        """Release the engine, and the processes and files of media."""
        if self._speech is not None:
            self._speech.close()
        super().shutdown()


def beam_search_output(
    output: RequestOutput, tokenizer: Tokenizer | None, params: BeamSearchParams, *, has_encoder: bool = False
) -> BeamSearchOutput:
    """Convert a beam search's output to vLLM's form; if the model `has_encoder`, without the prompt.

    Raises:
        EngineError: the search failed.
    """
    sequences = []
    for one in output.outputs:
        if one.finish_reason not in ("stop", "length"):
            raise EngineError(
                f"the beam search of request {output.request_id} ended early: {one.stop_reason}"
            )
        tokens = [*([] if has_encoder else output.prompt_token_ids), *one.token_ids]
        is_silent = one.finish_reason == "stop" and not params.include_stop_str_in_output
        text = None
        if tokenizer is not None:
            text = tokenizer.decode(
                tokens[: len(tokens) - is_silent],
                skip_special_tokens=params.skip_special_tokens,
                shown=params.shown_special_token_ids,
            )
        logprobs, total = list(one.logprobs or ()), one.cumulative_logprob or 0.0
        sequences.append(
            BeamSearchSequence(
                output.prompt, tokens, logprobs, total, text, one.finish_reason, one.stop_reason
            )
        )
    return BeamSearchOutput(sequences)

# SPDX-License-Identifier: Apache-2.0
"""Features of sampling through a whole engine, offline and over HTTP."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.trace import read_trace, replay
from quire.entrypoints.llm import LLM
from quire.errors import ConfigError, StartupError, ValidationError
from quire.logits_processors import LogitsProcessor, RequestLogitsProcessor
from quire.outputs import FlatLogprobs
from quire.sampling_params import BeamSearchParams, SamplingParams
from tests.end_to_end.test_overlapped import jobs_of_all_kinds, serve
from tests.entrypoints.openai.serving import client_for

PROMPT = "What is the capital of France?"
IDS = [5, 6, 7, 8, 9, 10, 11, 12]


class OnlyGivenToken(LogitsProcessor):
    """`extra_args["only"]` is the one token that is generated; a negative one is an error."""

    def for_request(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        only = (params.extra_args or {}).get("only")
        if only is None:
            return None
        if only < 0:
            raise ValueError("a token id is at least 0")

        def force(_prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, -torch.inf)
            forced[only] = 0.0
            return forced

        return force


class NoProcessor:
    pass


class Broken(LogitsProcessor):
    def __init__(self, config: EngineConfig) -> None:
        raise ValueError("no such table")

    def for_request(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return None


def make_llm(model_dir: Path, **args: Any) -> LLM:
    return LLM(str(model_dir), **{"max_model_len": 96, "cpu_threads": 1} | args)


def generate(llm: LLM, *params: SamplingParams) -> list[Any]:
    return [output.outputs[0] for output in llm.generate([IDS] * len(params), list(params), use_tqdm=False)]


@pytest.fixture
def llm(tiny_model: Callable[[str], Path]) -> LLM:
    return make_llm(tiny_model("llama-tied-bias"))


# Logits processors


@pytest.mark.parametrize("named", [OnlyGivenToken, f"{__name__}:OnlyGivenToken"])
def test_engine_logits_processor_changes_only_its_requests(
    named: Any, llm: LLM, tiny_model: Callable[[str], Path]
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (plain,) = generate(llm, greedy)
    with_processor = make_llm(tiny_model("llama-tied-bias"), logits_processors=[named])
    asked, bad = greedy.clone(extra_args={"only": 7}), greedy.clone(extra_args={"only": -1})
    forced, failed, other = generate(with_processor, asked, bad, greedy)
    assert (forced.token_ids, other.token_ids) == ([7] * 5, plain.token_ids)
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert "a token id is at least 0" in failed.stop_reason


def test_a_request_brings_its_own_processors(llm: LLM) -> None:
    """They see the prompt and all tokens so far, and what one does wrong costs no other."""
    seen: list[tuple[list[int], list[int]]] = []

    def count_up(prompt: list[int], output: list[int], logits: torch.Tensor) -> None:
        seen.append((prompt, output))
        logits[20 + len(output)] = 1e4

    def raises(_prompt: list[int], output: list[int], _logits: torch.Tensor) -> None:
        if len(output) == 2:
            raise KeyError("table")

    def not_a_number(_prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits / 0.0 * 0.0

    def wrong_shape(_prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[:5]

    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    each = (count_up, raises, not_a_number, wrong_shape)
    outputs = generate(llm, greedy, *(greedy.clone(logits_processors=[one]) for one in each))
    assert outputs[1].token_ids == [20, 21, 22, 23]
    assert seen == [(IDS, [20, 21, 22, 23][:count]) for count in range(4)]
    assert outputs[0].token_ids == outputs[2].token_ids[:2] + outputs[0].token_ids[2:]
    assert [one.finish_reason for one in outputs] == ["length", "length", "error", "error", "error"]
    assert [len(one.token_ids) for one in outputs] == [4, 4, 2, 0, 0]
    for one, words in zip(outputs[2:], ("KeyError", "NaN or infinite", "shape"), strict=True):
        assert words in one.stop_reason


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("no_such_module:X", "cannot import"),
        (f"{__name__}:NoProcessor", "not a subclass"),
        (f"{__name__}:Broken", "no such table"),
    ],
)
def test_a_processor_that_cannot_be_made_is_an_error_at_start(
    named: str, why: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises((ConfigError, StartupError), match=why):
        make_llm(tiny_model("llama-tied-bias"), logits_processors=[named])


def test_a_class_in_a_function_cannot_be_named(tiny_model: Callable[[str], Path]) -> None:
    class Local(OnlyGivenToken):
        pass

    with pytest.raises(ConfigError, match="top level of a module"):
        make_llm(tiny_model("llama-tied-bias"), logits_processors=[Local])


def test_unsupported_sampling_options_are_refused(
    llm: LLM, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match="this engine has none"):
        generate(llm, SamplingParams(extra_args={"only": 1}))
    with pytest.raises(ValidationError, match="thinking_token_budget needs the markers"):
        generate(llm, SamplingParams(thinking_token_budget=1))
    recording = make_llm(tiny_model("llama-tied-bias"), record_trace=str(tmp_path / "trace"))
    with pytest.raises(ValidationError, match="cannot be recorded"):
        generate(recording, SamplingParams(logits_processors=[print]))
    recording.shutdown()


def test_a_recorded_run_with_all_features_is_replayed(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    args = {"model": str(tiny_model("llama-tied-bias")), "max_model_len": 96, "record_trace": str(path)}
    serve(jobs_of_all_kinds(), **args)
    assert sum(1 for _ in replay(read_trace(path))) > 50


# Single features, where their meaning shows


def test_bad_words_are_not_generated() -> None:
    llm = LLM(max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=24)
    (plain,) = llm.chat([{"role": "user", "content": PROMPT}], params, use_tqdm=False)
    assert "Paris" in plain.outputs[0].text
    (output,) = llm.chat(
        [{"role": "user", "content": PROMPT}], params.clone(bad_words=["Paris"]), use_tqdm=False
    )
    assert "Paris" not in output.outputs[0].text
    assert output.outputs[0].text[:4] == plain.outputs[0].text[:4]


def test_bad_words_are_bounded(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="the limits are 128"):
        generate(llm, SamplingParams(bad_words=[f"word{i}" for i in range(65)]))
    for bad in ([""], ["x" * 5000], ["a"] * 129):
        with pytest.raises(ValidationError, match="bad_words"):
            SamplingParams(bad_words=bad)


def test_reasoning_ends_when_its_budget_is_used_up() -> None:
    """The markers are words here, so that the included model has some."""
    llm = LLM(max_model_len=128, reasoning_start_str="?", reasoning_end_str=" Done.")
    start, end = (llm.get_tokenizer().encode(text) for text in ("?", " Done."))
    prompt = [*llm.get_tokenizer().encode("What"), *start]
    for budget in (0, 3):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, thinking_token_budget=budget)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids[budget : budget + len(end)] == end
    (free,) = llm.generate([prompt], params.clone(thinking_token_budget=None), use_tqdm=False)
    assert "Done." not in free.outputs[0].text


def test_markers_need_each_other() -> None:
    with pytest.raises(ConfigError, match="need each other"):
        LLM(max_model_len=64, reasoning_start_str="<a>")


def test_flat_logprobs_are_the_same_numbers(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=9, logprobs=3, prompt_logprobs=2)
    plain, flat = (
        llm.generate([IDS], one, use_tqdm=False)[0] for one in (params, params.clone(flat_logprobs=True))
    )
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == plain.outputs[0].logprobs
    assert flat.prompt_logprobs is not None
    assert plain.prompt_logprobs is not None
    assert [position or None for position in flat.prompt_logprobs] == plain.prompt_logprobs
    assert flat.outputs[0].logprobs[2:4] == FlatLogprobs() + plain.outputs[0].logprobs[2:4]
    assert flat.outputs[0].logprobs[-1] == plain.outputs[0].logprobs[-1]


def test_listed_tokens_have_the_numbers_of_the_whole_vocabulary(tiny_model: Callable[[str], Path]) -> None:
    llm = make_llm(tiny_model("llama-tied-bias"), max_logprobs=-1)
    params = SamplingParams(seed=1, max_tokens=6, temperature=1.5)
    listed = [200, 3, 77]
    everything, some = generate(llm, params.clone(logprobs=-1), params.clone(logprob_token_ids=listed))
    for whole, part in zip(everything.logprobs, some.logprobs, strict=True):
        assert set(part) == {*listed, next(iter(part))}
        assert part == {token: whole[token] for token in part}


def test_logprobs_modes(tiny_model: Callable[[str], Path]) -> None:
    params = SamplingParams(seed=3, max_tokens=8, temperature=0.7, top_k=4, logprobs=-1, prompt_logprobs=-1)
    found = {}
    for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"):
        llm = make_llm(tiny_model("llama-tied-bias"), logprobs_mode=mode, max_logprobs=-1)
        (output,) = llm.generate([IDS], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        sums = [sum(math.exp(one.logprob) for one in p.values()) for p in output.prompt_logprobs[1:] if p]
        assert (sums == pytest.approx([1.0] * len(sums))) == mode.endswith("logprobs")
        found[mode] = output.outputs[0]
    raw, logits, processed, shaped = found.values()
    assert raw.token_ids == logits.token_ids == processed.token_ids == shaped.token_ids
    for place, token in enumerate(raw.token_ids):
        log_sum = logits.logprobs[place][token].logprob - raw.logprobs[place][token].logprob
        for other, one in raw.logprobs[place].items():
            assert logits.logprobs[place][other].logprob - one.logprob == pytest.approx(log_sum, abs=1e-4)
        kept = [one for one in processed.logprobs[place].values() if one.logprob > -math.inf]
        assert len(kept) == 4
        assert sum(math.exp(one.logprob) for one in kept) == pytest.approx(1.0)
        expected = logits.logprobs[place][token].logprob / 0.7
        assert shaped.logprobs[place][token].logprob == pytest.approx(expected, abs=1e-4)


def test_the_prefix_cache_can_be_left_alone(llm: LLM) -> None:
    prompt, params = [list(range(3, 60))], SamplingParams(temperature=0, max_tokens=3)
    cached = [
        llm.generate(prompt, one, use_tqdm=False)[0].num_cached_tokens
        for one in (params, params, params.clone(skip_reading_prefix_cache=True))
    ]
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] > 0


def test_a_special_token_stops_where_it_is_no_text() -> None:
    llm = LLM(max_model_len=128, cpu_threads=1)
    tokenizer = llm.get_tokenizer()
    special, *_ = sorted(tokenizer.special_ids - {tokenizer.eos_token_id})
    forced = [*tokenizer.encode("Hi there", add_special_tokens=False), special, 7]

    def force(_prompt: list[int], output: list[int], logits: torch.Tensor) -> None:
        logits[forced[len(output)]] = 1e4

    literal = tokenizer.literal(special)
    asked = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logits_processors=[force])
    for stop, text in ((literal, "Hi there"), (f"there{literal}", "Hi ")):
        for include in (False, True):
            params = asked.clone(stop=[stop], include_stop_str_in_output=include)
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
            found = output.outputs[0]
            assert (found.text, found.stop_reason) == (text + (stop if include else ""), stop)
            assert (found.finish_reason, found.token_ids) == ("stop", forced[:-1])


def test_dry_ends_a_loop_that_a_breaker_lets_go_on() -> None:
    llm = LLM(max_model_len=128, cpu_threads=1)
    a, b, c, line = (
        llm.get_tokenizer().encode(text, add_special_tokens=False)[-1] for text in ("a", "b", "c", "\n")
    )

    def favor(wanted: list[int]) -> Any:
        def favor_next(_prompt: list[int], output: list[int], logits: torch.Tensor) -> None:
            logits[:] = -50.0
            logits[c] = -1.0
            logits[wanted[len(output) % len(wanted)]] = 0.0

        return favor_next

    def generated(wanted: list[int], **values: Any) -> list[int]:
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, logits_processors=[favor(wanted)], **values
        )
        return list(llm.generate([[a]], params, use_tqdm=False)[0].outputs[0].token_ids)

    assert generated([a, b]) == [a, b] * 6
    assert c in generated([a, b], dry_multiplier=2.0)
    assert generated([b, line], dry_multiplier=2.0) == [b, line] * 6
    assert c in generated([b, line], dry_multiplier=2.0, dry_sequence_breakers=[])


@pytest.mark.parametrize("count", [1, 7, 15])
def test_mirostat_goes_on_after_a_core_is_replaced(
    count: int, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the supervisor has it: a new core gets the prompt and the tokens so far."""
    asked = SamplingParams(
        mirostat=2, mirostat_tau=3.0, mirostat_eta=0.6, seed=3, max_tokens=16, ignore_eos=True
    )
    (whole,) = generate(make_llm(tiny_model("llama-tied-bias")), asked)
    llm = make_llm(tiny_model("llama-tied-bias"), max_num_batched_tokens=8, max_num_seqs=2)
    processor = llm.llm_engine.input_processor
    process = processor.process

    def resumed(*args: Any, **options: Any) -> list[Any]:
        known = whole.token_ids[:count]
        return [msgspec.structs.replace(one, output_token_ids=known) for one in process(*args, **options)]

    monkeypatch.setattr(processor, "process", resumed)
    (rest,) = generate(llm, asked)
    assert rest.token_ids == whole.token_ids[count:]


# Over HTTP


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    processors = (f"{__name__}:OnlyGivenToken",)
    config = EngineConfig.from_args(max_model_len=256, cpu_threads=1, logits_processors=processors)
    engine = AsyncLLM(config, in_process=True)
    await engine.wait_ready()
    async with client_for(engine) as client:  # type: ignore[arg-type]
        yield client
    await engine.shutdown()


async def test_over_http(client: httpx.AsyncClient) -> None:
    """One server for all, since each takes a second to start."""
    await _beam_search(client)
    await _refused_in_a_search(client)
    await _scored_prompts(client)
    body = {"prompt": "hi", "max_tokens": 3, "vllm_xargs": {"only": 9}, "return_token_ids": True}
    assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"] == [9, 9, 9]
    failed = await client.post("/v1/completions", json=body | {"vllm_xargs": {"only": -1}})
    assert failed.status_code == 500
    assert "at least 0" not in failed.text


async def _beam_search(client: httpx.AsyncClient) -> None:
    llm = LLM(max_model_len=256, cpu_threads=1)
    (expected,) = llm.beam_search([PROMPT], BeamSearchParams(3, 12, length_penalty=0.5))
    body: dict[str, Any] = {"prompt": PROMPT, "n": 3, "use_beam_search": True, "length_penalty": 0.5}
    body |= {"max_tokens": 12, "logprobs": 2, "return_token_ids": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    num_prompt = len(llm.get_tokenizer().encode(PROMPT))
    for choice, sequence in zip(answer["choices"], expected.sequences, strict=True):
        assert choice["token_ids"] == sequence.tokens[num_prompt:]
        assert choice["finish_reason"] == sequence.finish_reason
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(sequence.cum_logprob)
    num_tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == num_tokens
    chat = {"messages": [{"role": "user", "content": PROMPT}], "n": 2, "use_beam_search": True}
    (first, _) = (await client.post("/v1/chat/completions", json=chat)).json()["choices"]
    assert "Paris" in first["message"]["content"]


async def _refused_in_a_search(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 3}
    assert (
        await client.post("/v1/completions", json=body | {"temperature": 1.0, "seed": 3})
    ).status_code == 200
    for field, value in {
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.5,
        "stop": ["a"],
        "logit_bias": {"3": 1},
        "bad_words": ["a"],
        "best_of": 2,
        "logprobs": 30,
    }.items():
        response = await client.post("/v1/completions", json=body | {field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    for field, value in {"length_penalty": 0.5, "early_stopping": True}.items():
        response = await client.post("/v1/completions", json={"prompt": "hi", field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def _scored_prompts(client: httpx.AsyncClient) -> None:
    """The form in which evaluation harnesses ask for the likelihood of a continuation."""
    llm = LLM(max_model_len=256, cpu_threads=1)
    prompts = [llm.get_tokenizer().encode(text) for text in (PROMPT, "The capital of France is Paris.")]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    for max_tokens in (0, 1):
        body = {
            "prompt": prompts,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
            "seed": 1,
        }
        choices = (await client.post("/v1/completions", json=body)).json()["choices"]
        for choice, ids, output in zip(choices, prompts, outputs, strict=True):
            numbers = choice["logprobs"]["token_logprobs"]
            assert len(numbers) == len(ids) + max_tokens
            assert output.prompt_logprobs is not None
            own = [p[i].logprob for i, p in zip(ids, output.prompt_logprobs, strict=True) if p]
            assert numbers[1 : len(ids)] == own
            for position, number in zip(choice["logprobs"]["top_logprobs"][1:], numbers[1:], strict=True):
                assert max(position.values()) >= number

# SPDX-License-Identifier: Apache-2.0
"""Speculation by every drafter on real models: tokens and logprobs are those of a run without it, bit for bit."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.outputs import RequestOutput
from quire.sampling_params import StructuredOutputsParams
from quire.spec_decode.drafter import Draft, Text
from tests.end_to_end.test_drafts import facts
from tests.end_to_end.test_overlapped import FEATURES, STEM, Job, overlapped, serve
from tests.fixtures.draft_heads import HEADS, write_mtp
from tests.fixtures.entry_points import Offer
from tests.fixtures.quick import quick
from tests.fixtures.tiny_models import VOCAB_SIZE, oracle_of
from tests.lora.adapters import linear_shapes, write_adapter

WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"max_num_seqs": 6},
    "chunked": {"max_num_seqs": 4, "max_num_batched_tokens": 20, "scheduling_policy": "fair", "enforce_eager": True},
    "preempting": {"max_num_seqs": 8, "max_num_batched_tokens": 24, "swap_space": 0.01},
    "overlapped": {"max_num_seqs": 6, **overlapped(2)},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"quantization": "int4", "adaptive": False, "num_speculative_tokens": 4},
    "ngram": {"prompt_lookup_min": 1, "adaptive": False},
    "suffix": {"adaptive": False, "num_speculative_tokens": 5},
    "auto": {},
    "recorded": {"synthetic_acceptance_rate": 0.7, "adaptive": False},
    "medusa": {"adaptive": False},
    "eagle": {"quantization": "int8", "adaptive": False, "num_speculative_tokens": 3},
    "eagle3": {"adaptive": False, "num_speculative_tokens": 5},
    "mtp": {"adaptive": False, "num_speculative_tokens": 2},
}
LOW_LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
"""What heads read of families with any number of layers."""


GRAMMARS = (
    StructuredOutputsParams(regex=r"[a-z]{2,9}(?: [0-9a-f]+)*!"),
    StructuredOutputsParams(choice=["one", "two", "twenty-two"]),
    StructuredOutputsParams(regex=r'\{"name": "[a-z]{1,5}", "number": [0-9]{1,4}\}'),
)
FAMILIES = ("llama-tied-bias", "gemma3", "qwen2moe")
MTP_FAMILY = "qwen3.5moe"
FEW_BLOCKS = {"llama-tied-bias": 8, "gemma3": 14, "qwen2moe": 8, MTP_FAMILY: 27}
"""Of which one request may take all but one or two."""
NUM_KNOWN = 24
"""Requests of each model and precision whose outputs without speculation are made once; half have a grammar."""


class Setting(NamedTuple):
    """One of the product, whose requests are drawn by its name."""

    method: str
    weights: str
    engine: str
    has_grammars: bool
    family: str

    def jobs(self) -> list[int]:
        """Return the numbers of this case's jobs, out of the model's; if preempting, too many for the cache."""
        draw, count = random.Random(str(self)), 4 if self.engine == "preempting" else 2
        return draw.sample(range(int(self.has_grammars), NUM_KNOWN, 2), count)


def settings_of(weights: str) -> list[Setting]:
    """All of a precision; families take turns."""
    product = itertools.product(METHODS, [weights], ENGINES, (False, True))
    families = itertools.cycle(FAMILIES)
    return [
        Setting(*one, MTP_FAMILY if one[0] == "mtp" else family)
        for one, family in zip(product, families, strict=False)
    ]


def random_jobs(draw: random.Random, count: int) -> list[Job]:
    """Prompts and choices that make texts repeat themselves more or less; every other one with a grammar."""
    jobs = []
    for number in range(count):
        phrase = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 9))]
        prompt = (STEM[: draw.randrange(20)] + phrase * draw.randrange(1, 5))[: draw.choice([9, 40, 60])]
        shape = {
            "temperature": draw.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.5]),
            "top_k": draw.choice([0, 5, 40]),
            "top_p": draw.choice([1.0, 0.9]),
            "min_p": draw.choice([0.0, 0.05]),
            "logprobs": draw.choice([None, 0, 3]),
            "max_tokens": draw.randrange(5, 32),
        }
        feature = draw.choice([{}, draw.choice(FEATURES), {"allowed_token_ids": [60, 61, 62]}])
        if number % 2:
            feature = {
                "structured_outputs": draw.choice(GRAMMARS),
                "repetition_penalty": draw.choice([1, 1.2]),
            }
        if "logprob_token_ids" in feature:
            del shape["logprobs"]
        jobs.append(Job(prompt, SamplingParams(**(shape | {"seed": number} | feature))))
    return jobs


def record(path: Path, outputs: list[RequestOutput]) -> None:
    """Write the file that the `recorded` drafter reads."""
    found = [{"prompt_token_ids": o.prompt_token_ids, "token_ids": o.outputs[0].token_ids} for o in outputs]
    path.write_text(json.dumps(found))


def guessing_for(model: Path, method: str, expected: list[RequestOutput], directory: Path) -> dict[str, str]:
    """Return the model key of `method`, if any: heads or a record written to the directory, or the target itself."""
    path = directory / method
    if method == "recorded":
        record(path, expected)
    elif method in HEADS and not path.exists():
        HEADS[method].write(path, **LOW_LAYERS)
    if method == "draft_model":
        path = model
    return {"model": str(path)} if path.exists() else {}


class Scenarios:
    """Runs settings, and knows what each model says without speculation."""

    def __init__(self, tiny_model: Callable[[str], Path], directory: Path) -> None:
        self._tiny_model, self._directory = tiny_model, directory
        self._known: dict[tuple[str, str], tuple[list[Job], list[RequestOutput]]] = {}
        self.drafted, self.accepted = Counter[str](), Counter[str]()
        self.num_preemptions = 0

    def run(self, setting: Setting) -> None:
        """Whoever else runs, and however: the outputs are those of all the model's requests together."""
        method, weights, engine, _, family = setting
        jobs, expected = self._known_of(weights, family)
        given = {"method": method} | METHODS[method]
        given |= guessing_for(self._model(family), method, expected, self._directory)
        args, chosen = self._args(weights, family) | ENGINES[engine], setting.jobs()
        if engine == "preempting":
            args["num_gpu_blocks_override"] = FEW_BLOCKS[family]
        got, stats = serve([jobs[i] for i in chosen], **args, speculative_config=given)
        assert facts(got) == facts([expected[i] for i in chosen]), f"{setting}: requests {chosen}"
        spec = stats.get("spec_decoding") or {}
        self.drafted[method] += spec.get("num_draft_tokens", 0)
        self.accepted[method] += spec.get("num_accepted_tokens", 0)
        self.num_preemptions += stats.get("num_preemptions", 0)

    def _known_of(self, weights: str, family: str) -> tuple[list[Job], list[RequestOutput]]:
        kind = weights, family
        if kind not in self._known:
            jobs = random_jobs(random.Random(str(kind)), NUM_KNOWN)
            self._known[kind] = jobs, serve(jobs, **self._args(weights, family))[0]
        return self._known[kind]

    def _args(self, weights: str, family: str) -> dict[str, Any]:
        return {"model": str(self._model(family)), "max_model_len": 96, **WEIGHTS[weights]}

    def _model(self, family: str) -> Path:
        model = self._tiny_model(family)
        if family != MTP_FAMILY:
            return model
        copy = self._directory / family
        return copy if copy.exists() else write_mtp(family, model, copy)


def test_random_requests_of_every_method_are_as_without(
    tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    """Each with a precision and an engine; all of the product are in the test behind."""
    scenarios, weights, engines = Scenarios(tiny_model, tmp_path), [*WEIGHTS], [*ENGINES]
    for index, method in enumerate(METHODS):
        family = MTP_FAMILY if method == "mtp" else FAMILIES[0]
        scenarios.run(Setting(method, weights[index // 4], engines[index % 4], index % 2 == 0, family))
    assert scenarios.drafted.total() > scenarios.accepted.total() > 10


@pytest.mark.more
@pytest.mark.parametrize("weights", WEIGHTS)
def test_requests_of_every_setting_are_as_without(
    weights: str, tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    """Method, engine and grammar; with all precisions some 700 requests in 288 settings."""
    scenarios, settings = Scenarios(tiny_model, tmp_path), settings_of(weights)
    for setting in settings:
        scenarios.run(setting)
    assert len(set(settings)) == 72
    assert min(scenarios.drafted[method] for method in METHODS if method != "auto") > 20
    assert scenarios.accepted.total() > 200
    assert scenarios.num_preemptions > 0


@pytest.mark.parametrize("method", quick(["ngram", "draft_model", "medusa", "eagle", "eagle3"], ["eagle"]))
def test_requests_with_adapters_are_as_without(
    method: str, tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    """Drafters ignore adapters, so more drafts are rejected and outputs stay the same."""
    model = tiny_model(FAMILIES[0])
    layers = {name: shape for name, shape in linear_shapes(oracle_of(model)).items() if "layers" in name}
    adapters = [None] + [
        LoRARequest(name, number, str(write_adapter(tmp_path / name, layers, seed=number)))
        for number, name in enumerate(("one", "two"), 1)
    ]
    jobs = [
        job._replace(adapter=adapters[number % 3])
        for number, job in enumerate(random_jobs(random.Random(8), 12))
    ]
    args: dict[str, Any] = {"model": str(model), "max_model_len": 96, "enable_lora": True, "max_loras": 2}
    args |= ENGINES["preempting"] | {"num_gpu_blocks_override": 16}
    expected, _ = serve(jobs, **args)
    given = {"method": method} | METHODS[method] | guessing_for(model, method, expected, tmp_path)
    got, stats = serve(jobs, **args, speculative_config=given)
    assert facts(got) == facts(expected)
    assert stats["spec_decoding"]["num_draft_tokens"] > 20


class Echo:
    """A drafter of another package: what stood at the start of the text comes again."""

    keys: ClassVar[frozenset[str]] = frozenset({"prompt_lookup_min"})

    def __init__(self, config: EngineConfig) -> None:
        assert config.speculative.settings.prompt_lookup[0] == 3

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        return [Draft(text.token_ids[: min(most, 3)].tolist()) for text in texts]

    def forget(self, request_id: str) -> None:
        """It knows nothing."""


def test_drafter_of_another_package_drafts(
    offer: Offer, tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """It understands one of the keys, and others are refused."""
    offer("quire.drafters", f"echo={__name__}:Echo")
    jobs = random_jobs(random.Random(4), 6)
    args: dict[str, Any] = {"model": str(tiny_model(FAMILIES[0])), "max_model_len": 96, **ENGINES["plain"]}
    expected, _ = serve(jobs, **args)
    given = {"method": "echo", "adaptive": False, "prompt_lookup_min": 3}
    got, stats = serve(jobs, **args, speculative_config=given)
    assert facts(got) == facts(expected)
    assert stats["spec_decoding"]["num_draft_tokens"] > 20
    with pytest.raises(ConfigError, match="prompt_lookup_max is not used by method 'echo'"):
        LLM(str(tiny_model(FAMILIES[0])), speculative_config={"method": "echo", "prompt_lookup_max": 3})


def test_request_reports_its_accepted_drafts(restore_threads: None) -> None:
    llm = LLM(cpu_threads=1, speculative_config={"method": "ngram", "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (output,) = llm.generate([[7, 8, 9] * 12], params)
    assert output.metrics.num_draft_tokens >= output.metrics.num_accepted_tokens
    assert output.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto", "mtp"])
def test_speculation_for_a_pooling_model_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="a pooling model generates no tokens to draft"):
        LLM("quire-demo-embed", speculative_config={"method": method})

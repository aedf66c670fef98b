# SPDX-License-Identifier: Apache-2.0
"""llama-server's routes: whole replies and events, options, prompts, infilling, what is shown, hostile input."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.entrypoints.fill_in import FillIn
from quire.entrypoints.llama_server.fields import FILE_MARKS, infill_prompt, prompts_of
from quire.entrypoints.llama_server.protocol import GeneratingRequest, InfillRequest, PromptRequest
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.replies import REPLIES
from tests.entrypoints.openai.serving import client_for, events
from tests.entrypoints.openai.test_fill_in import tokenizer_with
from tests.entrypoints.openai.test_fuzz import SETTINGS, odd
from tests.fixtures.folded import folded

PATH = "/completion"
ADMIN = {"authorization": "Bearer admin"}


async def ask(client: httpx.AsyncClient, path: str = PATH, **body: Any) -> Any:
    response = await client.post(path, json={"prompt": "hi", **body} if path == PATH else body)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, path: str = PATH, **body: Any) -> str:
    response = await client.post(path, json={"prompt": "hi", **body} if path == PATH else body)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize("reply", REPLIES)
async def test_events_join_to_the_whole(client: httpx.AsyncClient, engine: FakeEngine, reply: str) -> None:
    engine.reply = lambda prompt, index: reply
    body: dict[str, Any] = {"return_tokens": True, "n_probs": 2}
    whole = await ask(client, **body)
    response = await client.post(PATH, json={"prompt": "hi", "stream": True, **body})
    *parts, last = events(response.text)
    assert [part["stop"] for part in parts] == [False] * len(parts)
    for name in ("content", "tokens", "completion_probabilities"):
        joined = [one for part in parts for one in part[name]]
        assert joined == list(whole[name])
    empty = {"content": "", "tokens": [], "generation_settings": {}}
    whole.pop("completion_probabilities")
    assert {**last, **empty} == {**whole, **empty}
    assert whole["tokens_predicted"] == len(reply.encode()) + 1 == len(whole["tokens"])
    assert (whole["stop_type"], whole["tokens_evaluated"], whole["prompt"]) == ("eos", 2, "hi")
    assert whole["has_new_line"] == ("\n" in reply)


async def test_timings_count_computed_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens, engine.drafts = 1, (4, 3)
    reply = await ask(client, n_predict=3)
    assert reply["tokens_cached"] == 1
    assert reply["timings"] == {
        "cache_n": 1, "prompt_n": 1, "prompt_ms": 1000.0, "prompt_per_token_ms": 1000.0, "prompt_per_second": 1.0,
        "predicted_n": 3, "predicted_ms": 500.0, "predicted_per_token_ms": 166.667, "predicted_per_second": 6.0,
        "draft_n": 4, "draft_n_accepted": 3,
    }  # fmt: skip
    assert (reply["stop_type"], reply["stopping_word"]) == ("limit", "")


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await ask(
        client, n_predict=-1, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=5, stop=["y 0"],
        repeat_penalty=1.5, repeat_last_n=8, mirostat=0, xtc_probability=0.25, ignore_eos=True,
        logit_bias=[[65, 2.5], ["BC", False], [9999, 1]],
    )  # fmt: skip
    params = engine.seen[-1][1]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (None, 0.5, 7, 0.9)
    assert (params.seed, params.repetition_penalty, params.repeat_last_n) == (5, 1.5, 8)
    assert (params.xtc_probability, params.ignore_eos) == (0.25, True)
    assert params.logit_bias == {65: 2.5, 66: -100.0, 67: -100.0}
    assert reply["ignored"] == ["logit_bias"]
    assert (reply["content"], reply["stop_type"], reply["stopping_word"]) == ("Repl", "word", "y 0")
    settings = reply["generation_settings"]
    assert (settings["n_predict"], settings["top_k"], settings["repeat_penalty"]) == (-1, 7, 1.5)
    await ask(client, logit_bias={"65": 1, "B": False})
    assert engine.seen[-1][1].logit_bias == {65: 1.0, 66: -100.0}
    await ask(client, seed=2**32 - 1)
    assert engine.seen[-1][1].seed is None
    await ask(client, max_tokens=2)
    assert engine.seen[-1][1].max_tokens == 2
    await ask(client)
    assert engine.seen[-1][1].max_tokens is None


async def test_a_constraint_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, grammar='root ::= "yes" | "no"')
    constraint = engine.seen[-1][1].structured_outputs
    assert constraint is not None
    assert str(constraint.grammar).endswith('start: "yes"\n     | "no"\n\n')
    await ask(client, json_schema={"type": "object"}, grammar="")
    constraint = engine.seen[-1][1].structured_outputs
    assert constraint is not None
    assert constraint.json == '{"type":"object"}'
    assert "grammar" in await refused(client, grammar="x", json_schema={})
    assert "grammar" in await refused(client, grammar="root ::= (")


async def test_nothing_predicted_computes_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await ask(client, n_predict=0)
    assert (reply["content"], reply["tokens_predicted"], reply["stop_type"]) == ("", 0, "limit")
    assert reply["generation_settings"]["n_predict"] == 0
    assert engine.seen[-1][1].max_tokens == 1
    response = await client.post(PATH, json={"prompt": "hi", "stream": True, "n_predict": 0})
    (event,) = events(response.text)
    assert (event["stop"], event["tokens_predicted"]) == (True, 0)


async def test_cache_options_are_noted_unless_neutral(client: httpx.AsyncClient) -> None:
    reply = await ask(client, cache_prompt=True, id_slot=-1, n_keep=0)
    assert "ignored" not in reply
    reply = await ask(client, cache_prompt=False, id_slot=3, n_keep=5)
    assert sorted(reply["ignored"]) == ["cache_prompt", "id_slot", "n_keep"]


@folded(
    ("body", "part"),
    [
        ({"n_predict": -2}, "n_predict must be at least 0, or -1"),
        ({"n_predict": 1, "max_tokens": 1}, "max_tokens cannot be sent together with n_predict"),
        ({"n_probs": 1000}, "n_probs"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "name the adapter as the model"),
        ({"response_fields": ["content"]}, "response_fields is not supported"),
        ({"post_sampling_probs": True}, "post_sampling_probs is not supported"),
        ({"t_max_predict_ms": 5}, "send timeout"),
        ({"n_cmpl": 2}, "n_cmpl is not supported"),
        ({"samplers": ["top_k"]}, "samplers is not supported, but temperature_last is"),
        ({"min_keep": 4}, "min_keep is not supported"),
        ({"logit_bias": [[1]]}, "logit_bias must be a list of pairs"),
        ({"logit_bias": [[1, True]]}, "logit_bias must be a list of pairs"),
        ({"logit_bias": 3}, "logit_bias must be a list of pairs"),
        ({"prompt": 3}, "prompt must be text, a list"),
        ({"prompt": [1, True]}, "prompt must be text, a list"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["AAAA"]}}, "multimodal_data is not supported"),
        ({"prompt": ""}, "the prompt must not be empty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "the prompt must not be empty"),
        ({"prompt": [999]}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"stop": "x" * 5000}, "stop"),
        ({"prompt": "x" * 5000}, "4096"),
    ],
)  # fmt: skip
async def test_mistakes_are_named(client: httpx.AsyncClient, body: dict[str, Any], part: str) -> None:
    assert part in await refused(client, **body)


async def test_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json={"prompt": "hi", "model": "other"})
    assert response.status_code == 404


async def test_several_prompts_have_a_list_of_replies(client: httpx.AsyncClient) -> None:
    replies = await ask(client, prompt=["a", [98, 99], ["d", 101, "f"], {"prompt_string": "g"}])
    assert [reply["prompt"] for reply in replies] == ["a", "bc", "def", "g"]
    assert [reply["index"] for reply in replies] == [0, 1, 2, 3]
    response = await client.post(PATH, json={"prompt": ["a", "b"], "stream": True})
    ends = [event["index"] for event in events(response.text) if event["stop"]]
    assert sorted(ends) == [0, 1]


def test_prompt_forms_distinguish_one_from_several() -> None:
    tokenizer: Any = FakeTokenizer()
    for prompt, expected in (
        ("ab", ["ab"]),
        ([97, 98], [[97, 98]]),
        ([97, "b"], [[97, 98]]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([[97], "b", ["c", 100]], [[97], "b", [99, 100]]),
        ({"prompt_string": "a"}, ["a"]),
    ):
        assert prompts_of(prompt, tokenizer) == expected, prompt


@pytest.fixture
def _fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(prefix: str, suffix: str, *, add_special_tokens: bool) -> list[int]:
        return list(f"<{prefix}|{suffix}>".encode())

    monkeypatch.setattr(TextForm, "fill_in", SimpleNamespace(encode=encode, end_ids=[5]))


@pytest.mark.usefixtures("_fills_in")
async def test_infill_is_a_completion_of_the_gap(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    extra = [{"filename": "a.py", "text": "import a"}]
    reply = await ask(
        client, "/infill", input_prefix="def f(", input_suffix="): pass", prompt="x", input_extra=extra
    )
    assert reply["prompt"] == "\n\n--- snippet ---\n\nimport a<def f(|): pass>x"
    assert engine.seen[-1][1].stop_token_ids == (5,)
    assert reply["content"] == "Reply 0!"
    for bad in ([{"filename": 1, "text": "a"}], [{"filename": "a"}]):
        assert "input_extra.0 must be" in await refused(
            client, "/infill", input_prefix="a", input_suffix="b", input_extra=bad
        )


async def test_infill_needs_a_model_for_it(client: httpx.AsyncClient) -> None:
    message = await refused(client, "/infill", input_prefix="a", input_suffix="b")
    assert "input_suffix needs a fill-in-the-middle model" in message


@pytest.mark.parametrize("marks", FILE_MARKS)
def test_other_files_are_marked_as_in_training(marks: tuple[str, str]) -> None:
    middle = [f"<|fim_{name}|>" for name in ("prefix", "suffix", "middle")]
    tokenizer = tokenizer_with(*middle, *marks)
    extra = [{"filename": "a.py", "text": f"A{marks[0]}"}]
    fields = {"input_prefix": "p", "input_suffix": "s", "prompt": "m", "input_extra": extra}
    body = InfillRequest.model_validate(fields)
    ids = infill_prompt(body, FillIn(tokenizer), tokenizer)
    repository, separator = marks
    expected = (
        f"{repository}myproject\n{separator}a.py\nA{repository}{separator}filename\n"
        f"{middle[0]}p{middle[1]}s{middle[2]}m"
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert [tokenizer.id_of(repository)] == [
        token for token in ids if token == tokenizer.id_of(repository)
    ], "what a file spells out is no mark"


async def test_props_show_the_served_model(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    shown = (await client.get("/props")).json()
    assert (shown["model_alias"], shown["eos_token"], shown["bos_token"]) == ("fake-model", "<|im_end|>", "")
    assert shown["total_slots"] == engine.config.scheduler.max_num_seqs
    assert shown["chat_template"].startswith("{%- if tools")
    assert shown["default_generation_settings"]["n_ctx"] == 4096
    assert shown["default_generation_settings"]["params"]["n_predict"] == -1


async def test_slots_are_for_the_admin(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        assert (await client.get("/slots")).status_code == 404
    async with client_for(engine, admin_api_key="admin") as client:
        assert (await client.get("/slots")).status_code == 401
        slots = (await client.get("/slots", headers=ADMIN)).json()
        total = engine.config.scheduler.max_num_seqs
        assert [slot["is_processing"] for slot in slots] == [False] * total
        engine.running = {f"cmpl-{number}-0" for number in range(total)}
        slots = (await client.get("/slots", headers=ADMIN)).json()
        assert [slot["is_processing"] for slot in slots] == [True] * total
        busy = await client.get("/slots?fail_on_no_slot=1", headers=ADMIN)
        assert busy.status_code == 503
        assert (await client.get("/slots?x=1", headers=ADMIN)).status_code == 400


async def test_template_gives_the_prompt_of_a_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    await client.post("/v1/chat/completions", json={"messages": messages})
    prompt = FakeTokenizer().decode(engine.seen[-1][0]["prompt_token_ids"], skip_special_tokens=False)
    assert await ask(client, "/apply-template", messages=messages) == {"prompt": prompt}
    assert "no booms" in await refused(
        client, "/apply-template", messages=[{"role": "user", "content": "boom"}]
    )


async def test_content_is_tokenized_and_back(client: httpx.AsyncClient) -> None:
    text = "hi<|im_end|>"
    tokens = (await ask(client, "/tokenize", content=text))["tokens"]
    assert tokens == [104, 105, 257]
    assert (await ask(client, "/tokenize", content=text, parse_special=False))["tokens"] == list(
        text.encode()
    )
    assert await ask(client, "/detokenize", tokens=tokens) == {"prompt": text, "content": text}
    assert "return_token_strs" in await refused(client, "/tokenize", content=text, with_pieces=True)
    assert "prompt is required" in await refused(client, "/tokenize")


async def test_a_failure_ends_a_stream_with_an_error(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after = 2
    response = await client.post(PATH, json={"prompt": "hi", "stream": True})
    *_, last = events(response.text)
    assert last["error"]["message"].startswith("the request failed")


@pytest.mark.item(57, 58)
@pytest.mark.parametrize("model", [PromptRequest, InfillRequest], ids=lambda model: model.__name__)
@SETTINGS
@given(data=st.data())
def test_any_fields_get_an_answer_or_a_reason(model: type[GeneratingRequest], data: st.DataObject) -> None:
    names = st.sampled_from([*model.model_fields, "samplers", "unheard_of"])
    fields = data.draw(st.dictionaries(names, odd, max_size=4))
    base = {"prompt": "hi"} if model is PromptRequest else {"input_prefix": "a", "input_suffix": "b"}

    async def send() -> None:
        engine = FakeEngine()
        async with client_for(engine) as client:
            path = PATH if model is PromptRequest else "/infill"
            response = await client.post(path, json={**base, **fields})
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code == 200 and not fields.get("stream"):
            assert response.json()
        assert not engine.running

    asyncio.run(send())


def test_an_odd_prompt_is_a_mistake_of_the_client() -> None:
    for prompt in (None, 1.5, True, [None], [[["a"]]], {"prompt_string": 3}, {}):
        with pytest.raises(ValidationError, match="prompt must be text"):
            prompts_of(prompt, FakeTokenizer())  # type: ignore[arg-type]

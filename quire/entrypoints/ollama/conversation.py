"""From Ollama's requests to the fields of a chat request.

Invariant: an option comes under the name that chat knows, or is named as ignored because it concerns how a model is
loaded, or is refused.
"""

from __future__ import annotations

from typing import Any

from quire.entrypoints.ollama.protocol import ChatRequest, GenerateRequest, TurnRequest
from quire.errors import ValidationError

OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Ollama's names of sampling options, to chat's."""
CHAT_NAMES = {chat: f"options.{name}" for name, chat in OPTIONS.items()} | {
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
}
LOADING = frozenset(
    {
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv",
        "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only",
    }
)  # fmt: skip
"""Options that concern how a model is loaded and how long a conversation may be: the server's business here."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,), "tfs_z": (1,), "typical_p": (1,), "penalize_newline": (True,), "repeat_last_n": (-1,),
}  # fmt: skip
"""Options that are not supported, with the values that ask for nothing: our penalties look at the whole context, -1."""
ONLY_WITH_MIROSTAT = frozenset({"mirostat_tau", "mirostat_eta"})
NOT_SUPPORTED = ("suffix", "template", "images", "context", "raw")
Fields = dict[str, Any]


def chat_turn(request: ChatRequest) -> Fields:
    """The chat request of /api/chat.

    Raises:
        ValidationError: a message holds images, or an option cannot be honoured.
    """
    messages = [_message(message, f"messages.{index}") for index, message in enumerate(request.messages)]
    fields: Fields = {"messages": messages, **_shared(request)}
    return {**fields, "tools": request.tools} if request.tools else fields


def generate_turn(request: GenerateRequest) -> Fields:
    """The chat request of /api/generate: a conversation of one message. Raises ValidationError as `chat_turn` does."""
    for name in NOT_SUPPORTED:
        if getattr(request, name):
            hint = "; /v1/completions continues a text as it is" if name == "raw" else ""
            raise ValidationError(f"{name} is not supported{hint}", param=name)
    messages = [{"role": "system", "content": request.system}] if request.system else []
    return {"messages": [*messages, {"role": "user", "content": request.prompt}], **_shared(request)}


def ignored_options(request: TurnRequest) -> list[str]:
    """Names of the options that were sent and change nothing."""
    return [f"options.{name}" for name in request.options or {} if name in LOADING | ONLY_WITH_MIROSTAT]


def _shared(request: TurnRequest) -> Fields:
    fields: Fields = {"stream": request.stream, **_sampling(request.options or {})}
    if request.logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.think is not None:
        fields["enable_thinking" if isinstance(request.think, bool) else "reasoning_effort"] = request.think
    if request.format:
        fields["response_format"] = _response_format(request.format)
    return fields


def _sampling(options: Fields) -> Fields:
    fields: Fields = {}
    for name, value in options.items():
        if value is None or name in LOADING or name in ONLY_WITH_MIROSTAT:
            continue
        if name == "num_predict":
            fields |= {} if value in (-1, -2) else {"max_tokens": value}
        elif name in OPTIONS:
            fields[OPTIONS[name]] = value
        elif value not in NEUTRAL.get(name, ()):
            raise ValidationError(
                f"options.{name:.64} is not supported; leave it out", param=f"options.{name:.64}"
            )
    return fields


def _response_format(form: str | Fields) -> Fields:
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": form}}
    raise ValidationError("format must be json or a JSON schema", param="format")


def _message(message: Fields, where: str) -> Fields:
    """A chat message: calls have no type here, and a tool's result names the tool."""
    if message.get("images"):
        raise ValidationError(f"{where}.images: this model takes text only", param=f"{where}.images")
    kept = {
        name: message[name] for name in ("role", "content", "tool_call_id") if message.get(name) is not None
    }
    kept.setdefault("content", "")
    if message.get("thinking"):
        if not isinstance(message["thinking"], str):
            raise ValidationError(f"{where}.thinking must be text", param=f"{where}.thinking")
        kept["reasoning"] = message["thinking"]
    tool_name = message.get("tool_name") or message.get("name")
    if tool_name is not None:
        kept["name"] = tool_name
    calls = message.get("tool_calls")
    if not calls:
        return kept
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValidationError(f"{where}.tool_calls must be a list of calls", param=f"{where}.tool_calls")
    return {**kept, "tool_calls": [{**call, "type": "function"} for call in calls]}

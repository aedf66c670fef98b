"""`quire run`: answer one prompt in this process, without a server."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from quire.entrypoints.chat.formats.choice import PlainReader, choose
from quire.entrypoints.chat.formats.events import Event, Reasoning
from quire.entrypoints.chat.formats.examples import examples_of
from quire.entrypoints.chat.formats.model import ModelFormat, PromptEnd
from quire.entrypoints.cli.answer_printer import AnswerPrinter
from quire.entrypoints.cli.form import form_options, structured_outputs
from quire.entrypoints.cli.options import EngineCommand, engine_config
from quire.entrypoints.cli.values import HumanInt
from quire.errors import ValidationError
from quire.inputs import PromptType
from quire.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "stop", "ignore_eos", "structured_outputs")


@click.command(cls=EngineCommand)
@click.argument("prompt")
@form_options
@click.option(
    "--max-tokens", type=HumanInt(), default=256, show_default=True, help="Most tokens to generate."
)
@click.option("--temperature", type=click.FLOAT, help="Randomness; 0: always the most likely token.")
@click.option("--top-p", type=click.FLOAT, help="Draw from the likeliest tokens with this total probability.")
@click.option("--top-k", type=HumanInt(), help="Draw from this many of the likeliest tokens; 0: all.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token.")
@click.option("--system-prompt", help="System message put before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is; no chat template.")
def run(prompt: str, system_prompt: str | None, raw: bool, **params: Any) -> None:
    """Answer PROMPT (`-`: standard input) and end.

    A model with a chat template gets the prompt as a user's message. Sampling flags that are not given follow
    the model's generation config; `--seed` makes the draw reproducible.
    """
    if raw and system_prompt:
        raise click.UsageError("--system-prompt needs a chat template; drop --raw")
    form = structured_outputs(params)
    config = engine_config(params)
    text = sys.stdin.read() if prompt == "-" else prompt

    from quire.engine.llm_engine import LLMEngine

    engine = LLMEngine(config)
    try:
        asked = _rendered(engine, text, system_prompt, raw)
        _stream(engine, asked, _sampling_params(engine, {**params, "structured_outputs": form}, asked))
    finally:
        engine.shutdown()


@dataclass(frozen=True)
class Asked:
    """A prompt, and how its answer is read; without a format it is text."""

    prompt: PromptType
    formats: ModelFormat | None = None
    end: PromptEnd = field(default_factory=PromptEnd)


def _rendered(engine: LLMEngine, text: str, system_prompt: str | None, raw: bool) -> Asked:
    if engine.tokenizer is None:
        raise ValidationError("quire run needs a tokenizer; drop --skip-tokenizer-init")
    if raw or (engine.tokenizer.chat_template is None and not system_prompt):
        return Asked(text)

    from quire.entrypoints.chat.template import ChatTemplate
    from quire.entrypoints.chat.thinking import ThinkingSwitch

    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": text})
    template = ChatTemplate.from_tokenizer(engine.tokenizer)
    chat = template.compose(messages)
    chosen = choose("none", "auto", template.all_sources, examples_of(template))
    formats = ModelFormat(chosen, engine.tokenizer)
    is_off = ThinkingSwitch(template, chosen.reasoning).is_off({})
    end = PromptEnd.of(chat.text, messages, continues=False, may_think=not is_off)
    return Asked(chat.encode(engine.tokenizer), formats, end)


def _sampling_params(engine: LLMEngine, params: dict[str, Any], asked: Asked) -> SamplingParams:
    given = {name: params[name] for name in SAMPLING if params[name] is not None}
    defaults = engine.input_processor.default_sampling_params
    sampling = SamplingParams(**{**defaults, **given, "output_kind": RequestOutputKind.DELTA})
    return sampling if asked.formats is None else asked.formats.settled(sampling, asked.end)


def _stream(engine: LLMEngine, asked: Asked, sampling_params: SamplingParams) -> None:
    reader = asked.formats.reader(asked.end, None) if asked.formats is not None else PlainReader()
    printer = AnswerPrinter()
    engine.add_request("0", asked.prompt, sampling_params)
    was_cut = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            _show(reader.feed("".join(completion.text for completion in output.outputs)), printer)
            was_cut = any(completion.was_cut for completion in output.outputs)
    _show(reader.finish(was_cut=was_cut), printer)
    printer.end()


def _show(found: list[Event], printer: AnswerPrinter) -> None:
    for event in found:
        if isinstance(event, Reasoning):
            printer.thought(event.text)
        elif isinstance(event, str):
            printer.said(event)

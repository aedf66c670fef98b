"""`quire run`: answer one prompt in this process, without a server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

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
        _stream(
            engine,
            _rendered(engine, text, system_prompt, raw),
            _sampling_params(engine, {**params, "structured_outputs": form}),
        )
    finally:
        engine.shutdown()


def _rendered(engine: LLMEngine, text: str, system_prompt: str | None, raw: bool) -> PromptType:
    if engine.tokenizer is None:
        raise ValidationError("quire run needs a tokenizer; drop --skip-tokenizer-init")
    if raw or (engine.tokenizer.chat_template is None and not system_prompt):
        return text

    from quire.entrypoints.chat.template import ChatTemplate

    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": text})
    return ChatTemplate.from_tokenizer(engine.tokenizer).encode(engine.tokenizer, messages)


def _sampling_params(engine: LLMEngine, params: dict[str, Any]) -> SamplingParams:
    given = {name: params[name] for name in SAMPLING if params[name] is not None}
    defaults = engine.input_processor.default_sampling_params
    return SamplingParams(**{**defaults, **given, "output_kind": RequestOutputKind.DELTA})


def _stream(engine: LLMEngine, prompt: PromptType, sampling_params: SamplingParams) -> None:
    engine.add_request("0", prompt, sampling_params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            click.echo("".join(completion.text for completion in output.outputs), nl=False)
    click.echo()

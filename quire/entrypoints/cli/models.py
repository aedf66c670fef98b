# SPDX-License-Identifier: Apache-2.0
"""`quire pull | list | show | rm`: the models on this machine; `quire ps`: those that a server has loaded."""

from __future__ import annotations

import asyncio
import datetime
import json

import click

from quire.errors import ConfigError
from quire.model_cache.cache import size_text

CACHE = click.option("--download-dir", help="Cache directory for Hugging Face models.  [default: HF_HOME's]")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
TIMEOUT_S = 30.0
NAME = "NAME"


@click.command()
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of the model.")
@CACHE
def pull(model: str, revision: str | None, download_dir: str | None) -> None:
    """Fetch MODEL from Hugging Face: owner/name, or owner/name:Q4_K_M for one of its GGUF files.

    Bars show the progress on a terminal. A download that was interrupted goes on where it stopped.
    """
    from quire.model_cache.cache import is_hub_id, size_of_tree
    from quire.models.checkpoint import resolve_model_dir

    if not is_hub_id(model):
        raise ConfigError(
            f"{model!r} cannot be fetched; name a Hugging Face id such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    path = resolve_model_dir(model, revision, download_dir)
    click.echo(f"{model}: {size_text(size_of_tree(path))} at {path}")


@click.command("list")
@AS_JSON
@CACHE
def list_models(as_json: bool, download_dir: str | None) -> None:
    """List the models on this machine: those in the cache, the last used first, and the included ones."""
    from quire.config import BUNDLED_MODELS
    from quire.model_cache.cache import cached_models

    models = cached_models(download_dir)
    if as_json:
        rows = [
            {"model": one.id, "size": one.size_bytes, "last_used": one.last_used, "files": [*one.files]}
            for one in models
        ]
        click.echo(json.dumps(rows))
        return
    width = max(map(len, [*(one.id for one in models), *BUNDLED_MODELS]))
    for one in models:
        used = datetime.date.fromtimestamp(one.last_used)
        click.echo(f"{one.id:{width}}  {size_text(one.size_bytes):>11}  {used}  {one.form}")
    for name in BUNDLED_MODELS:
        click.echo(f"{name:{width}}  included")


@click.command()
@click.argument("model")
@click.option("--revision", help="Branch, tag or commit of the model.")
@AS_JSON
@CACHE
def show(model: str, revision: str | None, as_json: bool, download_dir: str | None) -> None:
    """Show what the files of MODEL say: architecture, size, types of its numbers, context, layers."""
    from quire.model_cache.facts import facts_of
    from quire.models.checkpoint import resolve_model_dir

    facts = facts_of(resolve_model_dir(model, revision, download_dir))
    if as_json:
        click.echo(json.dumps(facts))
        return
    for name, fact in facts.items():
        click.echo(f"{name:14}{fact}")


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@CACHE
def rm(models: tuple[str, ...], yes: bool, download_dir: str | None) -> None:
    """Remove MODELS (owner/name) from the cache, with all their revisions."""
    from quire.model_cache.cache import cached_model, remove

    found = [cached_model(name, download_dir) for name in dict.fromkeys(models)]
    total = sum(model.size_bytes for model in found)
    names = ", ".join(model.id for model in found)
    if not yes and not click.confirm(f"Remove {names} ({size_text(total)})?"):
        raise ConfigError("nothing was removed; --yes removes without asking")
    freed = sum(remove(model, download_dir) for model in found)
    click.echo(f"removed {names}: {size_text(freed)}")


@click.command()
@click.option("--url", default="http://localhost:8000", show_default=True, help="Address of the server.")
@click.option("--api-key", help="Bearer token; default: QUIRE_API_KEY or OPENAI_API_KEY.")
@AS_JSON
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """Show the models that a running server has loaded: their sizes, contexts and formats."""
    from quire.entrypoints.cli.chat import bearer_token
    from quire.entrypoints.cli.client import ServerClient

    models = asyncio.run(ServerClient(url, bearer_token(api_key), TIMEOUT_S).get("/api/ps"))["models"]
    if as_json:
        click.echo(json.dumps(models))
        return
    width = max(map(len, [NAME, *(model["name"] for model in models)]))
    click.echo(f"{NAME:{width}}  {'SIZE':>11}  {'CONTEXT':>9}  FORMAT")
    for model in models:
        details, context = model["details"], model.get("context_length", 0)
        form = f"{details['format']} {details['quantization_level']}"
        click.echo(f"{model['name']:{width}}  {size_text(model['size']):>11}  {context:>9,}  {form}")


list = list_models

# SPDX-License-Identifier: Apache-2.0
"""Many models behind one address (see many_models.md); read by the router's process only."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class ModelRouterConfig(Config):
    """Several models behind one address, each in a server of its own (see many_models.md)."""

    models: str | None = option(
        None,
        "YAML file of models, or directory of checkpoints: serve all, loaded on demand, by the model of a request.",
        metavar="FILE|DIRECTORY",
    )
    models_memory: int = option(
        0, "Bytes that loaded models may take together; 0: what is available at the start.", ge=0
    )
    models_max: int = option(0, "Most models loaded at once; 0: as many as memory holds.", ge=0)
    models_autoload: bool = option(
        True, "Load a model when a request names it; else only POST /models/load does."
    )
    models_keep_alive: float = option(
        -1.0,
        "Idle seconds until a model is unloaded, unless its entry or a request says otherwise; negative: never.",
    )
    models_wait_timeout: float = option(
        300.0, "Seconds that a request may wait for its model, until it is answered 503.", gt=0.0
    )
    models_turn: float = option(
        10.0, "Seconds that a model in use keeps its place while requests for another one wait.", ge=0.0
    )
    models_max_waiting: int = option(
        512, "Most requests that wait for models at once; further ones are answered 503.", ge=1
    )
    models_load_timeout: float = option(
        600.0, "Seconds that a model may take to load until it counts as failed.", gt=0.0
    )
    models_spare: bool = option(
        True,
        "Keep one process without a model ready for the next load, while memory for it is left (320 MiB).",
    )

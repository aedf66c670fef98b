"""Routes of pooling models, each family offered by the model's tasks."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.entrypoints.openai.families import EndpointFamily, ServerFeature, by_embedding
from quire.pooling.server import cohere, embeddings, pairs
from quire.pooling_params import CLASSIFY


def by_pooling(config: EngineConfig) -> bool:
    return config.pooling is not None


def by_classes(config: EngineConfig) -> bool:
    return config.pooling is not None and CLASSIFY in config.pooling.tasks


FEATURE = ServerFeature(
    families=(
        EndpointFamily(embeddings.embedding_router, by_embedding),
        EndpointFamily(embeddings.pooling_router, by_pooling),
        EndpointFamily(embeddings.classify_router, by_classes),
        EndpointFamily(pairs.router, pairs.offered),
        EndpointFamily(cohere.router, by_embedding),
    )
)

"""Ollama's API, translated to and from chat completions."""

from fastapi import APIRouter

from quire.entrypoints.ollama import models, routes

router = APIRouter()
router.include_router(routes.router)
router.include_router(models.router)

"""OpenAI's Responses API, translated to and from chat completions."""

from quire.entrypoints.openai.responses.routes import router as router

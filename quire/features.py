# SPDX-License-Identifier: Apache-2.0
"""Features that the core finds by name, so that it imports none of them.

A row is all that the core knows of a feature's class.
"""

CORE_FEATURES = {
    "structured_output": "quire.structured_output.holds:GrammarHolds",
    "lora": "quire.lora.holds:AdapterHolds",
    "multimodal": "quire.multimodal.holds:MediaHolds",
    "speech": "quire.speech.aligner:WordAligner",
    "kv_store": "quire.kv_store.tier:StoreTier",
    "kv_transfer": "quire.kv_store.transfer_tier:TransferTier",
    "console": "quire.console.recorder:ConsoleRecorder",
}
"""Feature -> `quire.engine.core_feature:CoreFeature`, in the order in which they are asked."""

SERVER_FEATURES = {
    "speech": "quire.speech.routes:FEATURE",
    "responses": "quire.entrypoints.openai.responses.routes:FEATURE",
    "pooling": "quire.pooling.server.feature:FEATURE",
    "ollama": "quire.entrypoints.ollama.routes:FEATURE",
    "anthropic": "quire.entrypoints.anthropic.messages:FEATURE",
    "sleep": "quire.sleep.routes:FEATURE",
    "lora": "quire.lora.server.routes:FEATURE",
    "console": "quire.console.routes:FEATURE",
    "training": "quire.training.routes:FEATURE",
}
"""Feature -> `quire.entrypoints.openai.families:ServerFeature`, in the order of the OpenAPI document."""

BROWSER_PAGES = {"console": "quire.console.pages:ConsolePages"}
"""Feature -> middleware that answers browsers before keys are asked for."""

MEDIA_ENCODER = "quire.multimodal.worker.encoders:open_encoder"
"""Factory of what computes and stores embeddings of images and other media (`quire.worker.worker`)."""

PROMPT_EMBEDS = "quire.multimodal.prompt_embeds:PromptEmbeds"
"""Reader of prompts that are embeddings (`quire.engine.input_processor`)."""

ENCODER_PROMPTS = "quire.seq2seq.prompts:EncoderPrompts"
"""Reader of prompts of models whose encoder reads text (`quire.engine.input_processor`)."""

WORKER_CALLS = {
    "weight_checksums": "quire.training.worker_calls:weight_checksums",
    "collective_rpc": "quire.training.worker_calls:collective_rpc",
    "check_finite": "quire.training.worker_calls:check_finite",
}
"""Function of a feature that a worker calls with itself and plain data, by name (`Worker.call`)."""

WEIGHT_UPDATES = {
    "offline": "quire.training.updates:WeightUpdates",
    "server": "quire.training.updates:AsyncWeightUpdates",
}
"""Weight updates of an `LLMEngine` and of an `AsyncLLM`, which are their only argument."""

WORKER_EXTENSION = "quire.training.extension:open_extension"
"""Factory of the object whose methods may be called on a worker (`quire.worker.worker`)."""

ROW_MOVER = "quire.kv_store.mover:open_row_mover"
"""Factory of what moves rows between a worker's host blocks and a store (`quire.worker.worker`)."""

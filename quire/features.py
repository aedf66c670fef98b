# SPDX-License-Identifier: Apache-2.0
"""Features that the core finds by name, so that it imports none of them.

A row is all that the core knows of a feature's class.
"""

START_FEATURES = {
    "pooling": "quire.pooling.models.resolve:PoolingStart",
    "structured_output": "quire.structured_output.request_constraints:GrammarStart",
    "spec_decode": "quire.spec_decode.start:DraftingStart",
    "lora": "quire.lora.start:LoRAStart",
}
"""Feature -> `quire.engine.start_feature:StartFeature`, in the order in which they are asked."""

CORE_FEATURES = {
    "structured_output": "quire.structured_output.holds:GrammarHolds",
    "lora": "quire.lora.holds:AdapterHolds",
    "multimodal": "quire.multimodal.holds:MediaHolds",
    "speech": "quire.speech.aligner:WordAligner",
    "kv_store": "quire.kv_store.tier:StoreTier",
    "kv_transfer": "quire.kv_store.transfer_tier:TransferTier",
    "console": "quire.console.recorder:ConsoleRecorder",
    "routing": "quire.routing.cache_deltas:CacheDeltas",
    "sleep": "quire.sleep.sleeper:Sleeper",
    "profiling": "quire.profiling.feature:StepProfiler",
}
"""Feature -> `quire.engine.core_feature:CoreFeature`, in the order in which they are asked."""

SLEEP_CONTROL = {"sleep": "quire.sleep.controller:SleepController"}
"""Feature -> `quire.engine.sleep_control:SleepControl`; none: the engine cannot sleep."""

CORE_ROUTER = {"routing": "quire.routing.router:Router"}
"""Feature -> `quire.engine.core_choice:CoreChoice`; none: requests go to the first core."""

REQUEST_OWNERS = {"beam_search": "quire.beam_search.requests:BeamSearches"}
"""Feature -> `quire.engine.request_owner:RequestOwner`, which runs requests with parameters of its own."""

BEAM_SEARCH = "quire.beam_search.search:BeamSearch"
"""Search of requests with `search` parameters (`quire.scheduler.beams:Search`)."""

CONSTRAINTS = {"structured_output": "quire.structured_output.request_constraints:Constraints"}
"""Feature -> `quire.engine.params_checks:ParamsChecks`; none: constraints on texts are refused."""

CORE_SUPERVISION = {"supervision": "quire.supervision.progress:CoreSupervision"}
"""Feature -> `quire.engine.supervision:Supervision`; none: a core that dies is not replaced."""

WORKER_FEATURES = {
    "structured_output": "quire.structured_output.worker.grammar:WorkerGrammars",
    "lora": "quire.lora.worker:WorkerAdapters",
    "pooling": "quire.pooling.worker:WorkerPooling",
    "spec_decode": "quire.spec_decode.worker.drafting:WorkerDrafting",
}
"""Feature -> `quire.worker.feature:WorkerFeature`, in the order in which they complete a step."""

SERVER_FEATURES = {
    "speech": "quire.speech.routes:FEATURE",
    "responses": "quire.entrypoints.openai.responses.routes:FEATURE",
    "pooling": "quire.pooling.server.feature:FEATURE",
    "ollama": "quire.entrypoints.ollama.routes:FEATURE",
    "llama_server": "quire.entrypoints.llama_server.routes:FEATURE",
    "anthropic": "quire.entrypoints.anthropic.messages:FEATURE",
    "sleep": "quire.sleep.routes:FEATURE",
    "lora": "quire.lora.server.routes:FEATURE",
    "console": "quire.console.routes:FEATURE",
    "training": "quire.training.routes:FEATURE",
    "profiling": "quire.profiling.routes:FEATURE",
}
"""Feature -> `quire.entrypoints.openai.families:ServerFeature`, in the order of the OpenAPI document."""

OFFLINE_METHODS = {"pooling": "quire.pooling.offline:OfflinePooling"}
"""Feature -> class on `quire.entrypoints.offline:OfflineEngine` whose methods `LLM` has."""

ADAPTER_SERVING = {"lora": "quire.lora.server.changes:AdapterChanges"}
"""Feature -> `quire.entrypoints.openai.adapter_serving:AdapterServing`; none: a server without adapters."""

SEARCH_PARAMS = {"beam_search": "quire.beam_search.routes:beam_search_params"}
"""Feature -> function that reads the parameters of a search from a request (`quire.entrypoints.openai.sampling`)."""

BROWSER_PAGES = {"console": "quire.console.pages:ConsolePages"}
"""Feature -> middleware that answers browsers before keys are asked for."""

MEDIA_ENCODER = "quire.multimodal.worker.encoders:open_encoder"
"""Factory of what computes and stores embeddings of images and other media (`quire.worker.worker`)."""

PROMPT_EMBEDS = "quire.multimodal.prompt_embeds:PromptEmbeds"
"""Reader of prompts that are embeddings (`quire.engine.input_processor`)."""

ENCODER_PROMPTS = "quire.seq2seq.image_prompts:prompts_of"
"""Reader of prompts of models whose encoder reads text or images (`quire.engine.input_processor`)."""

PIECE_TOKENIZER = "quire.seq2seq.tokenizer:read_pieces"
"""Reader of tokenizers that are SentencePiece models beside a vocabulary (`quire.engine.tokenizer`)."""

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

POOLING_MODEL = "quire.pooling.models.model:PoolingModel"
"""Model around another one that pools its hidden states (`quire.models.loader`)."""

ADAPTER_TOKENIZER = "quire.lora.tokenizer:adapter_context"
"""Reader of the tokenizer that an adapter brings (`quire.engine.tokenizer_cache`)."""

ADAPTER_CONTENTS = "quire.lora.request_adapters:LoRAContents"
"""Digests of adapters' contents (`quire.engine.front_end`)."""

MEDIA_ADAPTERS = "quire.lora.request_adapters:MediaAdapters"
"""Choice of the adapters that prompts with media imply (`quire.engine.front_end`)."""

PARKED_WEIGHTS = "quire.sleep.parked_weights:ParkedWeights"
"""Weights kept on the host while their worker sleeps (`quire.worker.worker`)."""

POOLING_INPUTS = "quire.pooling.inputs:PoolingInputs"
"""Reader of prompts and parameters of pooling models (`quire.engine.input_processor`)."""

POOLED_OUTPUTS = "quire.pooling.encode:encode_all"
"""Function that pools prompts by an asynchronous engine (`quire.engine.async_llm`)."""

# SPDX-License-Identifier: Apache-2.0
"""`prepare`: resolution of every automatic value of a user's configuration.

Invariant: every automatic choice is logged once, with its reason; later code resolves nothing. Torch-free, so the API
process can run it while the core process is still importing.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from pathlib import Path

from quire.config import EngineConfig, ModelArch
from quire.config.kv_store import PEER_SCHEMES
from quire.config.kv_transfer import with_absolute_key_file
from quire.config.quantization import METHODS
from quire.engine.file_states import states_of, tokenizer_dir
from quire.engine.packed_weights import default_packed_weights_cache
from quire.engine.rank_checks import check_experts, check_hosts, check_ranks
from quire.engine.replicas.configs import check_replicas
from quire.engine.start_feature import AutomaticValue, Usage, start_features
from quire.engine.tokenizer import Tokenizer
from quire.engine.without_effect import without_effect
from quire.errors import ConfigError, StartupError
from quire.kernels import cpu
from quire.models.checkpoint import read_model_config, resolve_model_dir
from quire.models.generation_config import read_generation_config
from quire.models.gguf.model import is_gguf
from quire.models.gguf.projector import with_projector
from quire.models.registry import ModelRegistry
from quire.platforms import Host, choose_device
from quire.plugins import load_general_plugins

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = {"server": 128, "offline": 256, "headless": 128}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"server": 2048, "offline": 4096, "headless": 2048}
MAX_ROUNDS = 16  # tokens of a request per plan, unless their number is given
MAX_MULTI_STEP_S = 0.5  # bound on a plan's rounds if outputs are read whole or rounds requested
MAX_SERVER_MULTI_STEP_S = 0.02  # default on a server: streams stay smooth, new requests start soon
MAX_SERVER_MIXED_STEP_S = 0.25  # default on a server: a stream that waits longer is seen to stop
NATIVE_DTYPES = ("float32", "bfloat16", "float16")
FIT_MEMORY = -1
"""Value of `max_model_len` for as much of the model's context as memory allows."""
MOST_POSITIONS = 2**25
"""Three times the longest context of any model; tables of so many positions take gigabytes."""
PROCESSORS = {"WhisperForConditionalGeneration": "quire.speech.rules:SpeechRules"}
"""Architecture -> logits processor that its requests need."""
DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def prepare(config: EngineConfig, usage: Usage) -> EngineConfig:
    """Find the model, read its config and resolve every field that is 0 or "auto".

    Raises:
        StartupError: the model cannot be found or read, or a field does not fit it.
    """
    load_general_plugins()
    config = with_absolute_paths(config)
    model_dir = resolve_model_dir(config.model.model, config.model.revision, config.load.download_dir)
    _check_load_format(config, model_dir)
    config = dataclasses.replace(config, model_dir=str(model_dir))
    config = dataclasses.replace(config, files=states_of(config))
    arch = read_model_config(
        model_dir, config.model.hf_overrides, config.model.model_impl, config.load.download_dir
    )
    arch = with_projector(arch, model_dir, config.multimodal)
    arch = dataclasses.replace(arch, generation=_generation_defaults(config, arch, model_dir))
    fit = config.model.max_model_len == FIT_MEMORY
    config = dataclasses.replace(
        config,
        model_arch=arch,
        model_class=ModelRegistry.place_of(arch.architecture, config.model.model_impl),
        fit_max_model_len=fit,
    )
    config = dataclasses.replace(config, files=states_of(config) | config.files)  # companions are known now
    features, chosen, max_seq_length = start_features(), list[AutomaticValue](), None
    for feature in features:
        found = feature.resolve(config, partial(_id_of, config))
        config = dataclasses.replace(config, **found.changes)
        chosen += found.choices
        max_seq_length = found.max_seq_length or max_seq_length
    if config.device.device == "auto":
        config = _with_logged_value(config, AutomaticValue("device", *choose_device()))
    for choice in [*_choose_whole_texts(config), *choose_number_of_nodes(config)]:
        config = _with_logged_value(config, choice)
    choices = [
        *chosen,
        choose_quantization(config),
        _choose_dtype(config),
        _choose_max_model_len(config, max_seq_length),
        *_choose_batch(config, usage),
        *_choose_loop(config),
        _choose_executor(config),
        _choose_impl(config),
        _choose_packed_weights_cache(config),
        _choose_name(config),
        *_choose_speech(config),
    ]
    for choice in filter(None, choices):
        config = _with_logged_value(config, choice)
    for choice in _choose_rounds(config, usage):
        config = _with_logged_value(config, choice)
    config.scheduler.check()
    _check_whole_texts(config)
    config.cache.check()
    config.kv_store.check(config.cache, config.parallel)
    config.observability.check()
    for feature in features:
        feature.check(config)
    config.quantization.check(config.device.device, encoded=config.arch.quantization is not None)
    check_hosts(config, headless=usage == "headless")
    check_ranks(config, serves=usage == "server")
    check_experts(config)
    check_replicas(config, usage=usage)
    config.kv_events.check(
        enable_prefix_caching=config.cache.enable_prefix_caching, replicas=config.parallel.replicas
    )
    _check_batch_invariant(config)
    for field, reason in without_effect(config):
        logger.warning("%s: changes nothing, %s", field, reason)
    for feature in features:
        config = feature.complete(config, usage)
    return config


def with_absolute_paths(config: EngineConfig) -> EngineConfig:
    """Return the config with absolute paths, as other processes have another working directory.

    Raises:
        ConfigError: the working directory does not exist.
    """
    here = working_directory()
    if config.model.tokenizer is not None:
        config = config.evolve(tokenizer=str(tokenizer_dir(config).absolute()))
    if config.load.packed_weights_cache is not None:
        cache = here / Path(config.load.packed_weights_cache).expanduser()
        config = config.evolve(packed_weights_cache=str(cache))
    if config.observability.record_trace:
        config = config.evolve(record_trace=str(here / config.observability.record_trace))
    for field in ("kv_store", "kv_store_key_file"):
        given = getattr(config.kv_store, field)
        if given is not None and not given.startswith(PEER_SCHEMES):
            config = config.evolve(**{field: str(here / Path(given).expanduser())})
    transfer = with_absolute_key_file(config.kv_store.kv_transfer_config, here)
    return config.evolve(
        kv_events_config=config.kv_events.with_absolute_paths(here), kv_transfer_config=transfer
    )


def working_directory() -> Path:
    """Return the working directory. Raises StartupError: it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise StartupError(
            "the working directory was deleted; change to one that exists, such as `cd /`, and start again"
        ) from None


def _check_load_format(config: EngineConfig, model_dir: Path) -> None:
    found, asked = "gguf" if is_gguf(model_dir) else "safetensors", config.load.load_format
    if asked in ("gguf", "safetensors") and asked != found:
        raise ConfigError(f"--load-format is {asked}, but {model_dir} is a model in {found}")


def _with_logged_value(config: EngineConfig, choice: AutomaticValue) -> EngineConfig:
    logger.info("%s = %s: %s", choice.field, choice.value, choice.reason)
    return config.evolve(**{choice.field: choice.value})


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Return the tokenizer of a prepared config; None if `skip_tokenizer_init` is set."""
    if config.model.skip_tokenizer_init:
        return None
    return Tokenizer.from_dir(tokenizer_dir(config))


def _id_of(config: EngineConfig, token: str) -> int | None:
    tokenizer = load_tokenizer(config)
    return None if tokenizer is None else tokenizer.id_of(token)


def _generation_defaults(config: EngineConfig, arch: ModelArch, model_dir: Path) -> dict[str, float]:
    source = config.model.generation_config
    if source == "quire":
        defaults: dict[str, float] = {}
    elif source == "auto":
        defaults = dict(arch.generation)
    else:
        defaults = dict(read_generation_config(Path(source)))
    return defaults | config.model.override_generation_config


def choose_quantization(config: EngineConfig) -> AutomaticValue | None:
    """Drop the name of the checkpoint's own format, which needs no option.

    Raises:
        ConfigError: the checkpoint has another format.
    """
    asked, found = config.quantization.quantization, config.arch.quantization
    if asked is None or (asked in METHODS and (found is None or asked not in found.method)):
        return None
    method = "gguf" if is_gguf(Path(config.model_dir)) else found.method if found else "floats"
    if asked not in method:
        raise ConfigError(
            f"--quantization is {asked}, but the checkpoint is in {method}; drop it, or use one of "
            f"{', '.join(METHODS)}"
        )
    return AutomaticValue("quantization", None, f"the checkpoint is in {method}")


def _choose_speech(config: EngineConfig) -> list[AutomaticValue]:
    """Choose what the requests of a model that transcribes need: its rules of sampling, and logprobs under them."""
    part = config.arch.part_of
    place = None if part is None else PROCESSORS.get(part.architecture)
    if place is None or config.model.skip_tokenizer_init:
        return []
    chosen, reason = config.model.logits_processors, "transcriptions follow Whisper's rules of sampling"
    processors = [] if place in chosen else [AutomaticValue("logits_processors", (*chosen, place), reason)]
    return [
        *processors,
        AutomaticValue("logprobs_mode", "processed_logprobs", "a transcript's logprobs are under its rules"),
    ]


def _choose_dtype(config: EngineConfig) -> AutomaticValue | None:
    dtype = config.model.dtype
    if dtype in DTYPE_ALIASES:
        return AutomaticValue("dtype", DTYPE_ALIASES[dtype], f"another name of {dtype}")
    if dtype != "auto":
        return None
    if config.arch.dtype not in NATIVE_DTYPES:
        return AutomaticValue(
            "dtype", "float32", f"there are no kernels for the checkpoint's {config.arch.dtype}"
        )
    if config.device.device != "cpu":
        return AutomaticValue("dtype", config.arch.dtype, "the checkpoint's, for weights and activations")
    if not cpu.available():
        return AutomaticValue(
            "dtype", "float32", "without the C++ kernels it is the fastest; every 16-bit number fits in it"
        )
    reason = "the checkpoint's, so weights are kept exactly; activations are float32"
    return AutomaticValue("dtype", config.arch.dtype, reason)


def _choose_max_model_len(config: EngineConfig, max_seq_length: int | None) -> AutomaticValue | None:
    """Choose the context length; sentence-transformers' `max_seq_length` may be below the model's positions."""
    asked, limit = config.model.max_model_len, context_limit(config.arch)
    if asked > limit:
        raise ConfigError(
            f"--max-model-len is {asked}, but the model was made for {limit} positions; give at most "
            "that, or extend it by rope_scaling in --hf-overrides"
        )
    if (asked if asked > 0 else limit) > MOST_POSITIONS:
        raise ConfigError(
            f"the context has {asked if asked > 0 else limit} positions, by the model's config.json "
            f"(max_position_embeddings), and may have {MOST_POSITIONS}; give a smaller --max-model-len"
        )
    if max_seq_length is not None and asked <= 0 and max_seq_length < limit:
        return AutomaticValue(
            "max_model_len", max_seq_length, "the longest text that sentence-transformers' files name"
        )
    if asked == FIT_MEMORY:
        return AutomaticValue(
            "max_model_len", limit, "what the model's config.json allows, until memory is measured"
        )
    return None if asked else AutomaticValue("max_model_len", limit, "what the model's config.json allows")


def context_limit(arch: ModelArch) -> int:
    """Return the longest sequence of the position embedding; scaled rotary ones extend the trained length."""
    rope = arch.rope
    if rope is None or rope.kind not in ("linear", "dynamic", "yarn"):
        return arch.max_position_embeddings
    trained = rope.original_max_position or arch.max_position_embeddings
    return max(arch.max_position_embeddings, int(trained * rope.factor))


def _choose_batch(config: EngineConfig, usage: Usage) -> list[AutomaticValue]:
    choices = []
    if not config.scheduler.max_num_seqs:
        default, tokens = DEFAULT_MAX_NUM_SEQS[usage], config.scheduler.max_num_batched_tokens
        if 0 < tokens < default:
            reason = "as many as --max-num-batched-tokens: each needs a token per step"
            choices.append(AutomaticValue("max_num_seqs", tokens, reason))
        else:
            choices.append(AutomaticValue("max_num_seqs", default, f"the default for {usage} use"))
    if not config.scheduler.max_num_batched_tokens:
        tokens, reason = DEFAULT_MAX_NUM_BATCHED_TOKENS[usage], f"the default for {usage} use"
        needed = max(config.model.max_model_len, 0) or context_limit(config.arch)
        if not config.scheduler.enable_chunked_prefill and needed > tokens:
            tokens, reason = needed, "without chunked prefill a step must hold the longest prompt"
        choices.append(AutomaticValue("max_num_batched_tokens", tokens, reason))
    if (
        usage != "offline"
        and config.scheduler.max_mixed_step_s is None
        and config.scheduler.enable_chunked_prefill
    ):
        reason = "streams wait no longer for the prompts of others"
        choices.append(AutomaticValue("max_mixed_step_s", MAX_SERVER_MIXED_STEP_S, reason))
    return choices


def _choose_whole_texts(config: EngineConfig) -> list[AutomaticValue]:
    """Disable partial texts for an encoder: all its tokens attend to one another."""
    if not config.arch.bidirectional:
        return []
    return [
        AutomaticValue("enable_chunked_prefill", False, "an encoder computes a text whole"),
        AutomaticValue("enable_prefix_caching", False, "an encoder has no KV cache"),
    ]


def _check_whole_texts(config: EngineConfig) -> None:
    longest, tokens = config.model.max_model_len, config.scheduler.max_num_batched_tokens
    if config.arch.bidirectional and tokens < longest:
        raise ConfigError(
            f"--max-num-batched-tokens is {tokens}, but an encoder computes texts of up to {longest} tokens "
            "(--max-model-len) whole, in one step"
        )


def choose_number_of_nodes(config: EngineConfig, host: Host | None = None) -> list[AutomaticValue]:
    """Choose a rank, or a replica, for each NUMA node of this host, if requested without a number."""
    field = _FOR_EACH_NODE.get(config.device.cpu_numa)
    if field is None or config.device.device != "cpu" or getattr(config.parallel, field) > 1:
        return []
    num = len((host or Host()).nodes())
    num_hosts = config.parallel.nnodes if field == "tensor_parallel_size" else 1
    reason = f"one for each of {num} NUMA nodes" + (
        f", on each of {num_hosts} hosts" if num_hosts > 1 else ""
    )
    return [AutomaticValue(field, num * num_hosts, reason)] if num > 1 else []


_FOR_EACH_NODE = {"ranks": "tensor_parallel_size", "replicas": "data_parallel_size"}


def _choose_executor(config: EngineConfig) -> AutomaticValue | None:
    if config.parallel.distributed_executor_backend != "auto":
        return None
    several = config.parallel.num_ranks > 1 or config.parallel.shares_experts
    reason = "each of several ranks has a process" if several else "one rank needs no process of its own"
    return AutomaticValue("distributed_executor_backend", "mp" if several else "uni", reason)


def _choose_packed_weights_cache(config: EngineConfig) -> AutomaticValue | None:
    found = default_packed_weights_cache(config)
    return None if found is None else AutomaticValue("packed_weights_cache", *found)


def _choose_loop(config: EngineConfig) -> list[AutomaticValue]:
    overlapped, asked = config.scheduler.async_scheduling, config.scheduler.max_steps_in_flight
    num_stages, choices = config.parallel.pipeline_parallel_size, []
    if overlapped is None:
        overlapped, reason = False, "on a CPU, planning takes from computing"
        if num_stages > 1:
            overlapped, reason = True, "each stage works at another step"
        elif config.device.device != "cpu":
            overlapped, reason = True, "a GPU works while the host plans"
        choices.append(AutomaticValue("async_scheduling", overlapped, reason))
    if asked > 1 and not overlapped:
        raise ConfigError(f"--max-steps-in-flight is {asked}, which needs --async-scheduling")
    if not asked:
        steps, reason = 1, "one after the other"
        if overlapped:
            steps, reason = 2, "one runs while the next is planned"
        if overlapped and num_stages > 1:
            steps, reason = num_stages, "one for each stage"
        choices.append(AutomaticValue("max_steps_in_flight", steps, reason))
    return choices


def _choose_rounds(config: EngineConfig, usage: Usage) -> list[AutomaticValue]:
    """Choose the decode steps per plan, their time limit, and offline also their use for streams."""
    field, asked, reason = "num_scheduler_steps", config.scheduler.num_scheduler_steps, why_one_round(config)
    if reason is not None and asked > 1:
        raise ConfigError(f"--num-scheduler-steps is {asked}, and {reason}")
    if not asked and reason is None and config.parallel.distributed_executor_backend != "uni":
        reason = "plans go to an executor that is no part of this process"
    if asked or reason is not None:
        choices = [AutomaticValue(field, asked or 1, reason or "as it was asked for")]
    else:
        choices = [
            AutomaticValue(field, MAX_ROUNDS, "planning takes a tenth of the time of a small model's token")
        ]
    if choices[0].value == 1:
        return choices
    if not config.scheduler.max_multi_step_s:
        limit = MAX_MULTI_STEP_S if asked or usage == "offline" else MAX_SERVER_MULTI_STEP_S
        choices.append(AutomaticValue("max_multi_step_s", limit, "streams and new requests wait no longer"))
    if not asked and usage == "offline" and config.scheduler.multi_step_streams is None:
        choices.append(
            AutomaticValue("multi_step_streams", False, "LLMEngine.step() returns each token as it comes")
        )
    return choices


def why_one_round(config: EngineConfig) -> str | None:
    """Return why a plan is limited to one token of each request; None if it is not."""
    if config.device.device != "cpu":
        return "a GPU works while the host plans"
    if config.scheduler.async_scheduling:
        return "--async-scheduling plans while others are computed"
    if config.parallel.num_ranks > 1 or config.parallel.shares_experts:
        return "several ranks end a step together"
    if config.speculative.settings.method is not None:
        return "--speculative-config guesses further tokens"
    if config.pooling is not None:
        return "a pooled model generates nothing"
    if config.device.enforce_eager:
        return "--enforce-eager records no steps"
    return None if cpu.available() else "without the C++ kernels no steps are recorded"


def _choose_impl(config: EngineConfig) -> AutomaticValue | None:
    if not config.arch.foreign_config:
        return None
    return AutomaticValue(
        "model_impl", "transformers", "its code, slower than a file of ours would be (docs/models.md)"
    )


def _choose_name(config: EngineConfig) -> AutomaticValue | None:
    if config.model.served_model_name:
        return None
    return AutomaticValue("served_model_name", (config.model.model,), "the model as it was named")


def _check_batch_invariant(config: EngineConfig) -> None:
    """Require the C++ kernels on a CPU: they are always batch-invariant, the torch reference never is."""
    if not config.kernels.batch_invariant or config.device.device != "cpu":
        return
    if not cpu.available():
        raise ConfigError(
            "--batch-invariant needs the C++ kernels on a CPU, and they were not built or are switched off"
        )

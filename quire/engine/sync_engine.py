# SPDX-License-Identifier: Apache-2.0
"""Synchronous engine, one `step()` at a time.

Invariant: no thread and no event loop of its own; the model runs in `step` only. Ctrl-C takes effect
between two methods of the engine, never within one, so no core message is lost. One thread at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.client import HeldInterrupts, closed_on_error, make_clients
from quire.engine.front_end import FrontEnd, Outgoing
from quire.engine.replicas.configs import replica_configs
from quire.engine.startup import prepare
from quire.errors import ConflictError, EngineDeadError, QuireError, ValidationError
from quire.inputs import PromptType
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.vllm_names.parameters import with_vllm_keywords


class SyncEngine:
    """Base of `LLMEngine`: owns the front end and steps the cores."""

    def __init__(self, config: EngineConfig, *, in_process: bool | None = None) -> None:
        config = prepare(config, "offline")
        if in_process is None:
            in_process = config.parallel.num_replicas == 1
        configs = replica_configs(config, in_process=in_process)
        self._one_thread = SingleThreadGuard()
        self._outputs: list[Any] = []
        self._clients = make_clients(configs, in_process=in_process)
        with closed_on_error(self._clients):
            self._front_end = FrontEnd(config, takes_callables=in_process, num_cores=len(configs))
            for core in range(len(configs)):
                self._receive(core)
        self.tokenizer = self._front_end.tokenizer
        self.input_processor = self._front_end.input_processor
        self.output_processor = self._front_end.output_processor

    @property
    def config(self) -> EngineConfig:
        """Configuration with all automatic values resolved."""
        return self._front_end.config

    @with_vllm_keywords("LLMEngine.add_request")
    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Queue a request; its id must not belong to an unfinished one.

        `priority` (lower first) needs the priority policy; `tenant` is the account under the fair policy.
        `lora_request` names an adapter; one that cannot be used finishes the request with finish_reason "error" and
        the reason in `stop_reason`. The first `step` later than `timeout_s` seconds after this call finishes it with
        "timeout".

        Raises:
            ValidationError: the prompt, a parameter or the id is invalid; nothing was queued.
        """
        arrived = self._front_end.clock()
        tokenized = self.input_processor.tokenize(prompt, adapter=lora_request)
        if isinstance(params, SamplingParams):
            params = self.input_processor.constraints.validated(params, tenant)
        with self._one_thread, HeldInterrupts():
            if request_id in self._front_end:
                raise ValidationError(f"request id {request_id!r} is already in use", param="request_id")
            _, messages = self._front_end.submit(
                request_id,
                tokenized,
                params,
                self._deliver,
                priority=priority,
                tenant=tenant,
                adapter_request=lora_request,
                timeout_s=timeout_s,
                arrived=arrived,
            )
            self._send(messages)
        return request_id

    def step(self) -> list[Any]:
        """Run one step of each core that has work, and return the new outputs.

        These are `RequestOutput`s, or the `PoolingRequestOutput`s of requests with `PoolingParams`.

        Raises:
            EngineDeadError: a core died, or one of its steps failed before.
            ConflictError: the engine sleeps, so that there is nothing to return.
        """
        with self._one_thread, HeldInterrupts():
            self._send(self._front_end.expire(self._front_end.clock()))
            if not self._outputs:
                self._front_end.check_health()
            for core in range(len(self._clients)):
                if self._front_end.expects(core):
                    self._receive(core)
        outputs, self._outputs = self._outputs, []
        if self.is_sleeping and self._front_end.num_unfinished and not outputs:
            raise ConflictError("the engine sleeps and its requests are suspended: wake_up() resumes them")
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests with finish_reason "abort"; their last output comes with the next `step`.

        Unknown ids are ignored.
        """
        with self._one_thread, HeldInterrupts():
            self._send(self._front_end.abort(request_ids))

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to do, or an output to return."""
        return self._front_end.num_unfinished > 0 or bool(self._outputs)

    @property
    def is_sleeping(self) -> bool:
        """True if anything of the engine sleeps, so that it takes no requests."""
        return bool(self._front_end.rest)

    def _close_features(self) -> None:
        """Release what a derived class holds beside the cores."""

    def shutdown(self) -> None:
        """Stop the cores; later calls fail. May be called twice."""
        self._front_end.die(EngineDeadError("the engine was shut down"))
        self._close_features()
        for client in self._clients:
            client.close()
        self._front_end.stat_loggers.close()
        self.input_processor.close()

    def _receive(self, core: int) -> None:
        try:
            messages = self._clients[core].receive()
        except QuireError as error:
            self._front_end.die(error)
            raise
        for message in messages:
            self._send(self._front_end.take_in(core, message))

    def _send(self, messages: list[Outgoing]) -> None:
        for core, message in messages:
            self._clients[core].send(message)

    def _deliver(self, output: Any) -> None:
        """Store an output; the error that ended the engine is raised by `step`."""
        if not isinstance(output, Exception):
            self._outputs.append(output)


class SingleThreadGuard:
    """Context that rejects a second thread at once instead of blocking it.

    Raises:
        ConflictError: on entry, while another thread is inside.
    """

    def __init__(self) -> None:
        self._in_use = threading.Lock()

    def __enter__(self) -> None:
        if not self._in_use.acquire(blocking=False):
            raise ConflictError(
                "this engine is in use by another thread, or by an iterator of outputs that is neither exhausted nor "
                "closed; AsyncLLM serves several callers at once"
            )

    def __exit__(self, *_: object) -> None:
        self._in_use.release()

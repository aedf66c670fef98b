"""What texts are in token ids: by the model's tokenizer, or as an adapter has it.

Invariant: an adapter's files are read once, not for each request; of those that were read, as many are kept as
adapters are kept in the host's memory. A request that has begun keeps its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.engine.adapter_tokenizer import own_tokenizer
from quire.engine.listed_tokens import find_thinking_markers
from quire.engine.tokenizer import Tokenizer
from quire.engine.vocabulary import end_ids
from quire.errors import ModelLoadError, StartupError, ValidationError
from quire.lora.directory import directory_of
from quire.lora_request import LoRARequest
from quire.sampling_params import ThinkingMarkers


@dataclass(frozen=True, eq=False)
class Lexicon:
    """A tokenizer, and what of its tokens requests go by."""

    tokenizer: Tokenizer | None
    end_ids: list[int]
    """Of tokens that end a text."""
    thinking_markers: ThinkingMarkers | None
    vocab_size: int
    """Ids that requests may name."""

    @staticmethod
    def of(config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int) -> Lexicon:
        """Raises ConfigError: the options about reasoning do not fit the tokenizer."""
        markers = find_thinking_markers(config, tokenizer, vocab_size)
        return Lexicon(tokenizer, end_ids(config, tokenizer, vocab_size), markers, vocab_size)


class Lexicons:
    """The model's, and those of its adapters; threads may share them.

    Raises:
        ConfigError: as `Lexicon.of`.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.model = Lexicon.of(config, tokenizer, config.arch.vocab_size)
        self._config = config
        self._lock = threading.Lock()
        self._of_adapters: OrderedDict[str, Lexicon] = OrderedDict()  # the one wanted longest ago first

    def known(self, adapter: LoRARequest | None) -> Lexicon | None:
        """That of an adapter, or of the model; None: its files have to be read."""
        if adapter is None or self.model.tokenizer is None or not self._config.lora.enable_lora:
            return self.model
        with self._lock:
            found = self._of_adapters.get(adapter.key)
            if found is not None:
                self._of_adapters.move_to_end(adapter.key)
            return found

    def of(self, adapter: LoRARequest | None) -> Lexicon:
        """That of an adapter, or of the model; reads files if it must.

        Raises:
            ValidationError: the adapter's tokenizer does not fit the model's; the message names the file.
        """
        found = self.known(adapter)
        if found is None:
            assert adapter is not None
            found = self._read(adapter)
            self._keep(adapter.key, found)
        return found

    def _keep(self, key: str, lexicon: Lexicon) -> None:
        with self._lock:
            self._of_adapters[key] = lexicon
            while len(self._of_adapters) > self._config.lora.num_kept:
                self._of_adapters.popitem(last=False)

    def _read(self, adapter: LoRARequest) -> Lexicon:
        model, directory = self.model.tokenizer, directory_of(adapter.lora_path)
        assert model is not None, "of an engine without a tokenizer, nobody has another"
        try:
            vocab_size = self._config.arch.vocab_size
            own = own_tokenizer(model, directory, vocab_size + self._config.max_added_tokens)
            if self._config.pooling is not None:
                return self._of_pooling(own, model)
            if own is model:
                return self.model
            return Lexicon.of(self._config, own, max(vocab_size, own.num_ids))
        except StartupError as error:
            problem = str(error).replace(f"{directory}/", "")  # where it lies is for the operator alone
            raise ValidationError(f"adapter {adapter.lora_name!r}: {problem}", param="lora_request") from None
        except OSError as error:  # no such path can be
            problem = error.strerror or "its files cannot be read"
            raise ValidationError(f"adapter {adapter.lora_name!r}: {problem}", param="lora_request") from None

    def _of_pooling(self, own: Tokenizer, model: Tokenizer) -> Lexicon:
        """The model's, by which all texts that are pooled are cut."""
        if own.vocab_size > model.vocab_size:
            raise ModelLoadError(f"{own.file}: adds tokens, which adapters of a pooling model cannot")
        return self.model

"""What grammars must know of a model's tokens, from its tokenizer.

Invariant: a token's bytes are those of `token_bytes`, by which texts are made, so what a grammar allows is what comes
out.
"""

from __future__ import annotations

from quire.config import EngineConfig
from quire.engine.file_states import check_files
from quire.engine.startup import load_tokenizer
from quire.engine.tokenizer import Tokenizer
from quire.structured_output.vocabulary import Vocabulary


def load_vocabulary(config: EngineConfig) -> Vocabulary:
    """The vocabulary of a model whose tokenizer has been found to be fit for grammars.

    Raises:
        ModelLoadError: the tokenizer cannot be read, or its files are no longer those of the start.
    """
    tokenizer = load_tokenizer(config)
    check_files(config)
    assert tokenizer is not None, "constraints are refused without a tokenizer"
    vocab_size = config.arch.vocab_size
    return vocabulary_of(tokenizer, vocab_size, end_ids(config, tokenizer, vocab_size))


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> Vocabulary:
    """As many tokens as the model has logits; special ones are no text."""
    hidden = set(tokenizer.special_ids) | set(ends)
    tokens = [b"" if i in hidden else tokenizer.token_bytes(i) for i in range(vocab_size)]
    special = {tokenizer.literal(i): i for i in tokenizer.special_ids if i < vocab_size}
    return Vocabulary(tokens, special, tuple(ends))


def end_ids(config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids that end a text: those that the model's files name, and the tokenizer's, if it is one of so many."""
    ids = list(config.arch.eos_token_ids)
    own = tokenizer.eos_token_id if tokenizer else None
    if own is not None and own not in ids and own < vocab_size:
        ids.append(own)
    return ids

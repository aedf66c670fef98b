# SPDX-License-Identifier: Apache-2.0
"""Model architecture as read from a checkpoint's config.json.

Invariant: `quire.models.hf_config` is the only reader of config.json; everyone else reads this frozen record, so a
foreign key or an unexpected type is detected once, at startup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quire.config.encoding import CheckpointQuantization


@dataclass(frozen=True)
class RopeScaling:
    """Rotary position embedding of one set of layers; `kind` selects the formula, unused fields stay at defaults."""

    kind: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    interleaved: bool = False
    backwards: bool = False  # Angles count in the opposite direction.

    def rotated(self, head_dim: int) -> int:
        """Return the rotated dimensions of a head; a fraction derived from such a number gives that number again."""
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * self.partial_rotary_factor + 1e-6)


# Merged layer that nearly every checkpoint stores in three parts.
QKV_APART: Mapping[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


@dataclass(frozen=True)
class CheckpointNames:
    """Checkpoint names that differ from Llama's, which our modules use."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Part of a module's path -> its name in the checkpoint; empty if that level is missing there.

    A part that is renamed in some places only includes the preceding parts: "linear_attn.norm", "layers.0.mlp",
    "experts.*.down_proj".
    """
    merged: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {**QKV_APART, "gate_up_proj": ("gate_proj", "up_proj")}
    )
    """Merged layer -> the modules it stands for; empty for a checkpoint that stores them merged.

    Places are written as in `renamed`.
    """
    # Patterns of tensors that are ignored on purpose.
    unused: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    # Names in transformers' modules, and so in adapters, if they differ from the checkpoint's.
    adapters: CheckpointNames | None = None


ENCODER_UNIT = 64
"""Multiple of the positions of an encoder's output, so that they fill whole blocks of a cache."""


def encoder_positions(length: int) -> int:
    """Return the first positions of a sequence that `length` rows of an encoder's output take; see
    `quire.models.encoder_decoder`.
    """
    return -(-length // ENCODER_UNIT) * ENCODER_UNIT


@dataclass(frozen=True)
class Multimodal:
    """Multimodal model that contains this language model, and what its other parts ask of the latter."""

    architecture: str
    # Prefix of its tensors -> prefix in a checkpoint of the language model alone; the first match counts.
    inside: Mapping[str, str]
    unused: tuple[str, ...]  # Patterns of the tensors of its other parts.
    # Tokens that the whole model replaces by an image, a video or a sound.
    placeholder_ids: frozenset[int] = frozenset()
    config: str = ""  # config.json of the whole model, as JSON, for the readers of its other parts.
    # Angles of a head that frames, rows and columns rotate; empty: a token has one position.
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False  # The sections take turns; otherwise one follows the other.
    tokens_per_second: float = 1.0  # Positions per second of a video.
    deepstack_layers: int = 0  # First layers to whose outputs features of an image are added.
    # Most rows of an encoder's output that cross-attention reads; 0: the model has none.
    encoder_length: int = 0
    reads_text: bool = False  # The encoder reads texts, which have any length; other inputs fill that length.
    decoder_length: int = 0  # Most positions of the decoder; 0: as the context allows.
    reads_images: bool = False  # The encoder reads an image; then a prompt is the decoder's.
    projector: str = ""  # GGUF file with the encoder; empty: it is in the checkpoint.
    # Names of the files that its processor reads -> their objects, as JSON; empty: they are in the checkpoint.
    processor_files: str = ""
    # Piece of names that a checkpoint of the language model alone lacks; empty: there is none.
    infix: str = ""
    # Kind of media -> directory in the checkpoint with the adapter of prompts that have some; the first kind counts.
    adapters: Mapping[str, str] = field(default_factory=dict)
    language_dir: str = ""  # Checkpoint of the language model alone; empty: its tensors are in this one.
    encoder_dir: str = ""  # Checkpoint of the encoder alone; empty: its tensors are in this one.

    @property
    def encoder_positions(self) -> int:
        """Most first positions of a sequence that take the encoder's output."""
        return encoder_positions(self.encoder_length)

    @property
    def further_dir(self) -> str:
        """Directory of the further checkpoint that the part with these names is in; empty: there is none."""
        return self.language_dir

    @property
    def companion_dirs(self) -> list[str]:
        """Directories of the checkpoints of its parts."""
        return [*filter(None, (self.language_dir, self.encoder_dir))]

    @property
    def is_prompted(self) -> bool:
        """True if a prompt has the encoder's input, a text or an image; sounds come in requests of their own."""
        return self.reads_text or self.reads_images

    @property
    def vectors_per_embedding(self) -> int:
        """Vectors of the stream's size per embedding: one, and one for each layer that adds features of its own."""
        return 1 + self.deepstack_layers

    def name_alone(self, name: str) -> str:
        """Return the name of a tensor or module in a checkpoint of the language model alone."""
        name = name.replace(self.infix, "") if self.infix else name
        for beginning, alone in self.inside.items():
            if name.startswith(beginning):
                return alone + name.removeprefix(beginning)
        return name


@dataclass(frozen=True)
class Routing:
    """Expert routing: selection of a token's experts and their weights; the formulas are in `ops.route`."""

    top_k: int  # Experts per token.
    scores: str = "softmax"  # "softmax", "sigmoid" or "sparsemixer"
    groups: int = 1  # Equal consecutive groups of experts; only the best groups are eligible.
    top_groups: int = 1  # Number of eligible groups.
    group_members: int = 1  # Number of its best experts by which a group is scored.
    normalized: bool = False  # A token's weights are divided by their sum.
    scale: float = 1.0
    reach: float = 0.0  # Parameter of SparseMixer, see `ops.route`.


@dataclass(frozen=True)
class ExpertStack:
    """Stacked storage of the weights [N, K] of a layer's E experts in one tensor, [E, N, K] by default."""

    transposed: tuple[str, ...] = ()  # Layers with weights [K, N]: "gate_up_proj", "down_proj".
    gate_up: str | None = None  # Name of the merged gate and up; None: as in a dense MLP.
    interleaved: bool = False  # Outputs of gate and up alternate.
    flat: bool = False  # The tensor is [E * N, K].
    weight: str = ".weight"  # Suffix behind the layer's name; empty in many checkpoints.
    bias: str = ".bias"
    # Companion tensors use full names, as if weight and bias had suffixes (ModelOpt).
    full_names: bool = False

    def suffix(self, tensor: str) -> str:
        """Return the suffix for a tensor of an unstacked module."""
        named = {"weight": self.weight, "bias": self.bias}
        beside = tensor if self.full_names else tensor.removeprefix("weight_")
        return named.get(tensor, f".{tensor}" if self.weight else f"_{beside}")


@dataclass(frozen=True)
class ExpertsArch:
    """Experts of a sparse model: MLPs of which each token uses a few."""

    count: int
    intermediate_size: int  # Of each expert.
    routing: Routing
    layers: tuple[int, ...]  # Numbers of the layers with experts; the others have the model's dense MLP.
    stack: ExpertStack | None = None  # Stacked storage of all experts in one tensor; None: separate tensors.
    # Separate experts are in lists of modules, "down_projs.3", with gate and up merged and alternating.
    listed: bool = False
    activation: str = "silu"  # Key of `quire.layers.activation.FUSED`.
    gated: bool = True  # Gated MLPs; otherwise the activation is applied to a single projection.
    # Size of a latent projection before and after the experts; 0: hidden states are used directly.
    latent_size: int = 0
    bias: bool = False  # Both weights of an expert have a bias.
    router_bias: bool = False
    alternates: bool = False  # Outputs of gate and up alternate in transformers' parameter.
    # Routing weights scale the experts' input (one expert per token) instead of their output.
    weighs_input: bool = False
    # Tensor, relative to the layer's MLP, added to scores for selection only.
    correction_bias: str | None = None
    correction_is_row: bool = False  # That tensor is [1, E] instead of [E].
    out_bias: bool = False  # The combined output has a bias.
    shared_size: int = 0  # Intermediate size of the shared expert that every token uses; 0: none.
    shared_gate: bool = False  # The shared expert's output is weighted by a gate of its own.


@dataclass(frozen=True)
class LatentArch:
    """Latent attention (MLA; DeepSeek-V2, 2024, arXiv:2405.04434): one vector per token for all heads."""

    rank: int  # Size of that vector, from which all heads' keys and values are computed.
    key_size: int  # Size of a head's key without the rotated part.
    rope_size: int  # Size of the rotated part of a query, and of a key, which all heads share.
    value_size: int  # Size of a head's value.
    # Size of the vector from which queries are computed; None: they are computed from x.
    query_rank: int | None = None
    gated: bool = False  # A head's output is weighted by the sigmoid of a gate.
    # The checkpoint stores the key and value projections separately, the former as absorbed into queries.
    absorbed: bool = False

    @property
    def query_size(self) -> int:
        """Size of a head's query."""
        return self.key_size + self.rope_size


@dataclass(frozen=True)
class Temperature:
    """Scaling of queries with their positions; the formula is in `quire.layers.attention`."""

    interval: float
    scale: float
    offset: float = 0.0
    rotated_too: bool = False  # Rotated queries are scaled, too; otherwise only unrotated ones.


@dataclass(frozen=True)
class ShortConvArch:
    """Short convolution layers that mix a token with the few before it (LFM2)."""

    taps: int  # Kernel size, including the token itself.
    bias: bool


@dataclass(frozen=True)
class DeltaArch:
    """Gated delta rule layers with a matrix state per head (Qwen3-Next)."""

    key_heads: int
    value_heads: int  # A multiple of `key_heads`: each key head serves consecutive value heads.
    key_dim: int
    value_dim: int
    taps: int  # Kernel size of the convolution over queries, keys and values.
    grouped: bool = False  # The checkpoint stores tensors grouped by key head.
    steps_grouped: bool | None = None  # The same for strengths and time steps; None: as the rest.
    in_turn: bool = False  # Key heads serve value heads in turn instead of consecutively.
    norm_eps: float | None = None  # Of the norm of a head's output; None: as the model's others.
    strongest: float = 1.0  # Upper bound of write strengths.
    least: float | None = None  # Lower bound of log decays; None: unbounded.
    narrow: bool = True  # Delta attention: time steps and gates are computed through a head-sized bottleneck.


@dataclass(frozen=True)
class RecurrentUnitArch:
    """RG-LRU layers (RecurrentGemma)."""

    width: int
    heads: int  # Equal parts of the width with gates of their own.
    taps: int


@dataclass(frozen=True)
class MambaArch:
    """Selective state space layers (Mamba)."""

    channels: int
    states: int  # Per channel.
    taps: int  # Kernel size of the convolution.
    rank: int  # Rank of the projection of time steps.
    bias: bool = False  # Of the input and output projections.
    conv_bias: bool = True
    norm_eps: float | None = None  # Of the norms on time step, b and c; None: there are none.
    norm_weight: bool = True


@dataclass(frozen=True)
class Mamba2Arch:
    """Selective state space layers with heads (Mamba 2)."""

    heads: int
    head_dim: int
    groups: int  # Equal parts of the heads that share b and c.
    states: int
    taps: int  # Kernel size of the convolution.
    norm_eps: float | None  # Of the norm on a layer's output; None: there is none.
    bias: bool = False  # Of the input and output projections.
    out_bias: bool | None = None  # Of the output projection; None: as `bias`.
    conv_bias: bool = True
    time_limits: tuple[float, float] = (0.0, float("inf"))
    gate_after_norm: bool = False  # The output is gated after the norm instead of before it.
    multipliers: tuple[float, ...] = ()  # Multipliers of gate, x, b, c and time steps; empty: none.


@dataclass(frozen=True)
class PLaMo2MambaArch:
    """Mamba layers with heads whose time step, b and c come from the convolution's output (PLaMo 2)."""

    heads: int
    head_dim: int
    states: int
    taps: int  # Kernel size of the convolution.
    rank: int  # Rank of the projection of time steps.


@dataclass(frozen=True)
class RotatedLightningArch:
    """Lightning attention layers with normed and rotated heads (Ring-linear)."""

    head_dim: int
    groups: int  # Equal parts of a layer's output, each normed.
    qk_norm: bool


@dataclass(frozen=True)
class RWKV7Arch:
    """RWKV-7 layers; ranks are those of low-rank projections."""

    head_dim: int
    decay_rank: int  # Of the decay.
    value_rank: int  # Of the mix of values with the first layer's.
    rate_rank: int  # Of the in-context learning rate (`a_low_rank_dim`).
    gate_rank: int


@dataclass(frozen=True)
class ParallelAttentionMambaArch:
    """Layers with parallel attention and Mamba 2, with multipliers of each one's input and output."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0


@dataclass(frozen=True)
class SharedBlocksArch:
    """Shared blocks of attention and MLP that layers use in turn (Zamba 2)."""

    layers: tuple[int, ...]  # Layers that use a block, in order: each uses the next block, cyclically.
    count: int
    adapter_rank: int
    adapts_attention: bool  # The per-layer adapters also cover q, k and v, not only gate and up.


@dataclass(frozen=True)
class TokenRowsArch:
    """Per-layer token embeddings: each layer adds what it computes from a row of its own (Gemma 3n, Gemma 4)."""

    vocab: int  # Tokens with a row; others have that of token 0.
    size: int
    media_token: int | None = 0  # Token whose row embeddings of media have; None: that of their placeholder.


@dataclass(frozen=True)
class TokenTableArch:
    """Table of some tokens in place of their rows of the vocabulary's; a norm and a linear layer follow (Gemma 3n)."""

    module: str  # Its name in the decoder.
    first: int  # The first of its tokens.
    count: int
    size: int
    eps: float


@dataclass(frozen=True)
class AlternatingArch:
    """Alternating updates: several residual streams (Gemma 3n)."""

    streams: int
    laurel_rank: int  # Inner size of the linear layers parallel to attention.
    sparsity: tuple[float, ...]  # Per layer, the fraction of an MLP's gate that is zeroed.


@dataclass(frozen=True)
class HeadArch:
    """Classification head on a text's vector, or on each token's."""

    classes: int
    of_tokens: bool = False  # Each token is classified instead of the text.
    pooling: str = "cls"  # Pooling of a text's vector: "cls" or "mean".
    # Activation after a first dense layer [H, H], a key of `quire.layers.activation.PLAIN`; None: no such layer.
    dense: str | None = None
    dense_bias: bool = True
    norm: bool = False  # That layer's output is normed.
    # Checkpoint tensor of the last weight if it is shared with another layer: the embedding table.
    table: str = ""
    table_bias: str = ""  # Its bias.


@dataclass(frozen=True)
class MTPArch:
    """Multi-token prediction layer: an additional layer by which the checkpoint drafts the token after the next.

    Defaults are DeepSeek-V3's.
    """

    at: str = "model.layers.{layers}"  # Path of the layer; {layers} is the number of layers before it.
    names: Mapping[str, str] = field(
        default_factory=lambda: {
            "enorm": "{at}.enorm",
            "hnorm": "{at}.hnorm",
            "eh_proj": "{at}.eh_proj",
            "head_norm": "{at}.shared_head.norm",
        }
    )  # Other modules of `quire.spec_decode.models.eagle.MTPHead` -> their paths; {at} is the layer's.
    # config.json declares it by `num_nextn_predict_layers`; otherwise it always exists.
    is_counted: bool = True
    # Token mixer of the layer, a key of `quire.models.blocks.MIXERS`; None: as the last layer's.
    mixer: str | None = None
    state_first: bool = False  # The hidden state precedes the embedding with which it is concatenated.
    reads_sums: bool = False  # It reads the input of the target's last norm instead of the output.
    gives_normed: bool = False  # Its output state is that of its last norm.

    def paths(self, num_layers: int) -> dict[str, str]:
        """Return the checkpoint path of each module, after `num_layers` layers."""
        at = self.at.format(layers=num_layers)
        return {"block": at, **{name: path.format(at=at) for name, path in self.names.items()}}


@dataclass(frozen=True)
class DraftArch:
    """Draft head that predicts from the hidden states of another model, its target."""

    method: str  # Key of `quire.spec_decode.models.reader.HEADS`.
    count: int = 1  # Heads, each of which drafts a token further ahead (Medusa).
    bias: bool = False  # The projection of hidden states has a bias.
    is_numbered: bool = False  # The checkpoint's modules are numbered instead of named (Medusa).
    # Target layers whose inputs it reads; empty: the output of the target's last norm.
    reads: tuple[int, ...] = ()
    vocab_size: int = 0  # Rows of an output head of its own; 0: none.
    has_offsets: bool = False  # The checkpoint maps the rows of that head to target tokens (`d2t`).
    adds_normed: bool = False  # The residual of its layer is the normed state (EAGLE-3).


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer, in a model whose layers differ."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    block: str | None = None  # Block structure, if that differs as well; None: as in `ModelArch`.
    head_dim: int | None = None  # None: as in `ModelArch`.


@dataclass(frozen=True)
class Skip:
    """Skip connection: the input of layer `end` is mixed with a share of the input of layer `start`."""

    start: int
    end: int
    share: float


@dataclass(frozen=True)
class ModelArch:
    """Shape and options of a transformer; defaults are Llama's."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: str = "float32"  # Of the checkpoint.
    eos_token_ids: tuple[int, ...] = ()  # From config.json, then those only in generation_config.json.
    bos_token_id: int | None = None
    # Default sampling parameters of generation_config.json, by `SamplingParams` field name.
    generation: dict[str, float] = field(default_factory=dict)
    names: CheckpointNames = field(default_factory=CheckpointNames)
    quantization: CheckpointQuantization | None = None  # None if all weights are floats.
    part_of: Multimodal | None = None  # None if the checkpoint is only a language model.

    block: str = (
        "sequential"  # Structure of norms, attention and MLP: a key of `quire.models.block_kinds.BLOCKS`.
    )
    first_block: str | None = None  # Of the first layer, if it differs.
    # By kind in `layer_types`, if it differs.
    blocks: Mapping[str, str] = field(default_factory=lambda: {"mlp": "mlp"})
    # Per layer, if they differ; the sizes above are then the largest. Empty: all layers have these.
    layer_shapes: tuple[LayerShape, ...] = ()
    skips: tuple[Skip, ...] = ()  # In order of application within a layer.
    norm: str = "rms"  # "rms" or "layer"
    norm_eps: float = 1e-6
    final_norm_eps: float | None = None  # Of the last norm, if it differs.
    norm_offset: float = 0.0  # Constant that the checkpoint omits from norm weights.
    # The same for some of a layer's norms, by our names, if it differs.
    norm_offsets: Mapping[str, float] = field(default_factory=dict)
    norm_weight: bool = True
    norm_bias: bool = True  # Of layer norms; others have none.
    residual_multiplier: float = 1.0
    # Kind of layers, or "mlp" -> multipliers of its normed input and of its output.
    stream_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    tie_word_embeddings: bool = False
    embedding_multiplier: float | None = None
    embedding_norm: bool = False
    # Position embeddings added to token embeddings: a key of `quire.models.decoder.POSITIONS`.
    positions: str | None = None
    position_offset: int = 0  # Unused rows at the start of the position table.
    head_bias: bool = False
    head_of_unit_rows: bool = False  # The output head's rows are divided by their norms.
    logits_multiplier: float = 1.0
    final_logit_softcap: float | None = None

    attention_in_size: int | None = None  # Input size of q, k and v, if it is not the hidden size.
    attention_bias: bool = False  # Of q, k and v.
    attention_out_bias: bool = False
    attention_scale: float | None = None  # Multiplier of scores; None: 1 / sqrt(head size).
    attn_logit_softcap: float | None = None
    # The checkpoint stores q, k and v, or k and v, grouped by key-value head in one tensor.
    qkv_grouped: bool = False
    qkv_blocks: int = 1  # Equal parts of the heads, each stored as queries, values and keys, in that order.
    # Experts among attention heads; only number and routing are used. None: there are none.
    attention_experts: ExpertsArch | None = None
    qkv_clip: float | None = None
    # Each head's output is weighted by the sigmoid of a gate, stored with its query.
    attention_gate: bool = False
    qk_norm: str | None = None  # Norm of q and k: a key of `quire.layers.head_norms.QK_NORMS`.
    v_norm: bool = False  # Values are normed per head, without weights.
    unnormed_layers: tuple[int, ...] = ()  # Layers without q and k norms all the same.
    # Token mixer per layer: a key of `quire.models.blocks.MIXERS`, or "mlp" for an MLP alone.
    layer_types: tuple[str, ...] = ()
    mamba: MambaArch | None = None
    mamba2: Mamba2Arch | None = None
    plamo2_mamba: PLaMo2MambaArch | None = None
    short_conv: ShortConvArch | None = None
    delta: DeltaArch | None = None
    recurrent_unit: RecurrentUnitArch | None = None
    rotated_lightning: RotatedLightningArch | None = None
    rwkv7: RWKV7Arch | None = None
    parallel_attention_mamba: ParallelAttentionMambaArch | None = None
    alternating: AlternatingArch | None = None
    shared_blocks: SharedBlocksArch | None = None
    # Layers without keys and values -> the earlier layer whose cache they read.
    shared_kv: Mapping[int, int] = field(default_factory=dict)
    sliding_window: int | None = None
    attention_chunk: int | None = None
    attention_sinks: bool = False  # Each head has a learned score that joins its softmax.
    temperature: Temperature | None = None
    rope: RopeScaling | None = None  # None if positions are encoded in another way.
    # Of layers with a window, or of lightning attention, if it differs.
    rope_local: RopeScaling | None = None
    unrotated_layers: tuple[int, ...] = ()
    alibi: float | None = None  # Multiplier of ALiBi's slopes; None: no ALiBi.
    # None if attention caches keys and values; else `head_dim` is the rotated part of a head.
    latent: LatentArch | None = None

    mlp: str = "gated"  # Key of `quire.models.blocks.MLPS`.
    hidden_act: str = "silu"
    mlp_bias: bool = False
    mlp_out_bias: bool | None = None  # Of the MLP's last layer; None: as `mlp_bias`.
    gate_multiplier: float = 1.0  # Of a gated MLP's gate, before its activation.
    mlp_multiplier: float = 1.0  # Of a gated MLP's output.
    up_first: bool = False  # A checkpoint with gate and up in one tensor has up first.
    # The checkpoint stores weights as [inputs, outputs], like GPT-2's Conv1D.
    transposed_weights: bool = False
    experts: ExpertsArch | None = None

    # Bidirectional attention: an encoder, without cache, which gets a text as a whole.
    bidirectional: bool = False
    # Token types, such as first and second text, with a learned embedding each; 0: none.
    token_types: int = 0
    relative_buckets: int = 0  # Distance buckets, with a learned score offset per head; 0: none.
    head: HeadArch | None = None

    do_layer_norm_before: bool = True
    final_norm: bool = True
    word_embed_proj_dim: int | None = None

    # Multi-token prediction layer that its checkpoint may have.
    mtp: MTPArch = field(default_factory=MTPArch)
    draft: DraftArch | None = None  # Draft head's architecture; such a checkpoint is no model by itself.
    kept_layers: tuple[int, ...] = ()
    """Layers whose inputs are appended, in order, to the hidden states of a row, for draft heads. The last norm counts
    as one more.
    """

    foreign_config: str = ""  # config.json with overrides, as JSON, for models run by transformers.

    key_bias: bool = True  # Keys have a bias if queries and values have one (`attention_bias`).
    relative_farthest: int = 128  # Distance from which on all distances share one bucket.
    relative_everywhere: bool = (
        False  # Each layer has its own offsets; otherwise the first layer's count for all.
    )
    logits_bias: bool = (
        False  # The checkpoint has a bias of logits apart from the head ("final_logits_bias").
    )
    crossing_size: int | None = None  # Of the encoder's output, if it is not the hidden size.
    token_rows: TokenRowsArch | None = None
    keys_as_values: bool = False  # Layers without a window project keys only, and norm them apart as values.
    full_layers_causal: bool = False  # Layers without a window never attend ahead, not even within an image.
    token_tables: tuple[TokenTableArch, ...] = ()

    @property
    def media_size(self) -> int:
        """Size of an embedding of media, or of a row of an encoder's output."""
        return self.crossing_size or self.hidden_size

    def of_layer(self, layer: int) -> ModelArch:
        """Return the architecture with one layer's sizes."""
        if not self.layer_shapes:
            return self
        shape = self.layer_shapes[layer]
        return replace(
            self,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
            head_dim=shape.head_dim or self.head_dim,
        )

    def block_of(self, layer: int) -> str:
        """Return the block structure of a layer."""
        own = self.layer_shapes[layer].block if self.layer_shapes else None
        if own is not None:
            return own
        if layer == 0 and self.first_block is not None:
            return self.first_block
        return self.blocks.get(self.layer_types[layer], self.block)

    def mlp_of(self, layer: int) -> str:
        """Return the kind of a layer's MLP."""
        return "sparse" if self.experts is not None and layer in self.experts.layers else self.mlp

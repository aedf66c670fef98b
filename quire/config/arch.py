"""What a checkpoint's config.json says, in our own names.

Invariant: `quire.models.hf_config` is the only reader of config.json; everyone else reads this frozen record,
so a foreign key or a surprising type is met once, at start-up.
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
    backwards: bool = False
    """Whether angles count the other way round."""

    def rotated(self, head_dim: int) -> int:
        """How many dimensions of a head are turned; a fraction made of such a number gives that number again."""
        return int(head_dim * self.partial_rotary_factor + 1e-6)


QKV_APART: Mapping[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
"""The merged layer that nearly every checkpoint has in three."""


@dataclass(frozen=True)
class CheckpointNames:
    """What a checkpoint calls otherwise than Llama's do, whose names our modules have."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """A part of a module's path -> what stands there instead; nothing, if that level is missing there.

    A part that is called so at some places alone stands with those before it: "linear_attn.norm", "layers.0.mlp",
    "experts.*.down_proj".
    """
    merged: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {**QKV_APART, "gate_up_proj": ("gate_proj", "up_proj")}
    )
    """A merged layer -> the modules that it stands for; a checkpoint in which they are merged already has none.

    Places are told as in `renamed`.
    """
    unused: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    """Patterns of tensors that are knowingly left out."""
    adapters: CheckpointNames | None = None
    """What transformers' modules, and so those of adapters, are called, where checkpoints call them otherwise."""


@dataclass(frozen=True)
class Multimodal:
    """The model of several kinds of input of which this is the language model, all that is served of it."""

    architecture: str
    inside: Mapping[str, str]
    """How its tensors begin -> what stands there in a checkpoint of the language model alone; the first that fits."""
    unused: tuple[str, ...]
    """Patterns of the tensors of its other parts."""
    placeholder_ids: frozenset[int] = frozenset()
    """Tokens in whose place the whole model puts what it makes of an image, a video or a sound."""

    def name_alone(self, name: str) -> str:
        """What a tensor or a module is called in a checkpoint of the language model alone."""
        for beginning, alone in self.inside.items():
            if name.startswith(beginning):
                return alone + name.removeprefix(beginning)
        return name


@dataclass(frozen=True)
class Routing:
    """How experts are chosen for a token, and what their outputs are weighted with; the formulas are in `ops.route`."""

    top_k: int
    """Experts of a token."""
    scores: str = "softmax"
    """"softmax", "sigmoid" or "sparsemixer"."""
    groups: int = 1
    """Equal parts of the experts, in order, of which only the best are chosen from."""
    top_groups: int = 1
    """How many of them are."""
    group_members: int = 1
    """How many of its best experts a group is judged by."""
    normalized: bool = False
    """Whether a token's weights are divided by their sum."""
    scale: float = 1.0
    reach: float = 0.0
    """Of SparseMixer, see `ops.route`."""


@dataclass(frozen=True)
class ExpertStack:
    """How a checkpoint has the matrices [N, K] of a layer's E experts in one tensor, [E, N, K] unless it is said."""

    transposed: tuple[str, ...] = ()
    """Layers whose matrices are [K, N]: "gate_up_proj", "down_proj"."""
    gate_up: str | None = None
    """What gate and up, merged, are called; None: as in an MLP that is no expert."""
    interleaved: bool = False
    """Whether outputs of gate and up alternate."""
    flat: bool = False
    """Whether it is [E * N, K]."""
    weight: str = ".weight"
    """What is behind the layer's name; nothing, in many."""
    bias: str = ".bias"
    full_names: bool = False
    """Whether what is beside a weight is called so, as where a module bears both (ModelOpt), though none does."""

    def suffix(self, tensor: str) -> str:
        """What is behind the layer's name where a module that is no stack has this tensor."""
        named = {"weight": self.weight, "bias": self.bias}
        beside = tensor if self.full_names else tensor.removeprefix("weight_")
        return named.get(tensor, f".{tensor}" if self.weight else f"_{beside}")


@dataclass(frozen=True)
class ExpertsArch:
    """The experts of a sparse model: MLPs of which each token is seen by a few."""

    count: int
    intermediate_size: int
    """Of each."""
    routing: Routing
    layers: tuple[int, ...]
    """The layers that have experts, by number; the others have the model's MLP."""
    stack: ExpertStack | None = None
    """How the checkpoint has the matrices of all experts in one tensor; None: they are apart."""
    listed: bool = False
    """Whether apart they are in lists of modules, "down_projs.3", gate and up as one whose outputs alternate."""
    activation: str = "silu"
    """A key of `quire.layers.activation.FUSED`."""
    gated: bool = True
    """Whether they are gated MLPs; else their activation is that of a product of one part."""
    latent_size: int = 0
    """Of what they read and give, made of hidden states and into them again; 0: hidden states themselves."""
    bias: bool = False
    """Whether both matrices of an expert have one."""
    router_bias: bool = False
    alternates: bool = False
    """Whether outputs of gate and up alternate in the parameter that transformers makes of them."""
    weighs_input: bool = False
    """Whether weights scale what the experts, one for each token, read, and not what they give."""
    correction_bias: str | None = None
    """What is added to scores for the choice alone: its tensor, as seen from the layer's MLP."""
    correction_is_row: bool = False
    """Whether that tensor is [1, E] and not [E]."""
    out_bias: bool = False
    """Whether there is one of what they give together."""
    shared_size: int = 0
    """Intermediate size of the expert that sees every token; 0: there is none."""
    shared_gate: bool = False
    """Whether that one's output is weighted by a gate of its own."""


@dataclass(frozen=True)
class LatentArch:
    """Latent attention (MLA; DeepSeek-V2, 2024, arXiv:2405.04434): a token is one vector for all heads."""

    rank: int
    """Of that vector, from which all heads' keys and values are made."""
    key_size: int
    """Of a head's key, less what is rotated."""
    rope_size: int
    """What is rotated of a query, and of a key, of which all heads have the same."""
    value_size: int
    """Of a head's value."""
    query_rank: int | None = None
    """Of the vector from which queries are made; None where they are made of x itself."""
    gated: bool = False
    """Whether what a head makes is weighted by the sigmoid of a gate."""
    absorbed: bool = False
    """Whether the checkpoint has what makes keys and what makes values apart, the former as queries meet it."""

    @property
    def query_size(self) -> int:
        """Of a head's query."""
        return self.key_size + self.rope_size


@dataclass(frozen=True)
class Temperature:
    """How queries grow with their positions; the formula is in `quire.layers.temperature`."""

    interval: float
    scale: float
    offset: float = 0.0
    rotated_too: bool = False
    """Whether queries that are rotated grow as well; else those alone that are not."""


@dataclass(frozen=True)
class ShortConvArch:
    """Layers that mix a token with the few before it, and nothing else (LFM2)."""

    taps: int
    """Tokens that one is made of, itself included."""
    bias: bool


@dataclass(frozen=True)
class DeltaArch:
    """Layers whose heads have a matrix that the gated delta rule keeps (Qwen3-Next)."""

    key_heads: int
    value_heads: int
    """A multiple: each key head serves so many value heads one after the other."""
    key_dim: int
    value_dim: int
    taps: int
    """Of the convolution over queries, keys and values."""
    grouped: bool = False
    """Whether the checkpoint has what belongs to a key head side by side."""
    steps_grouped: bool | None = None
    """The same of strengths and time steps; None: as the rest."""
    in_turn: bool = False
    """Whether key heads serve value heads in turn, and not so many one after the other."""
    norm_eps: float | None = None
    """Of the norm of what a head makes; None: as the model's others."""
    strongest: float = 1.0
    """What strengths of writing go up to."""
    least: float | None = None
    """What logarithms of decays go down to; None: they have no bound."""
    narrow: bool = True
    """Of delta attention: whether time steps and gates are made by way of so few numbers as a head has."""


@dataclass(frozen=True)
class RecurrentUnitArch:
    """Layers of RG-LRUs (RecurrentGemma)."""

    width: int
    heads: int
    """Equal parts of the width, of which each has gates of its own."""
    taps: int


@dataclass(frozen=True)
class MambaArch:
    """Layers with a selective state space (Mamba)."""

    channels: int
    states: int
    """Of each channel."""
    taps: int
    """Of the convolution."""
    rank: int
    """Numbers of which a token's time steps are made."""
    bias: bool = False
    """Of the projections in and out."""
    conv_bias: bool = True
    norm_eps: float | None = None
    """Of the norms of what chooses a step; None: there are none."""
    norm_weight: bool = True


@dataclass(frozen=True)
class Mamba2Arch:
    """Layers with a selective state space of heads (Mamba 2)."""

    heads: int
    head_dim: int
    groups: int
    """Equal parts of the heads that read and write their states alike."""
    states: int
    taps: int
    """Of the convolution."""
    norm_eps: float | None
    """Of the norm of what a layer makes; None: there is none."""
    bias: bool = False
    """Of the projections in and out."""
    out_bias: bool | None = None
    """Of the projection out; None: as `bias`."""
    conv_bias: bool = True
    time_limits: tuple[float, float] = (0.0, float("inf"))
    gate_after_norm: bool = False
    """Whether what a layer makes is gated when it has been normed, and not before."""
    multipliers: tuple[float, ...] = ()
    """Of gate, x, b, c and time steps; none: they stay as they are."""


@dataclass(frozen=True)
class HeadedMambaArch:
    """Layers with a selective state space of heads, of which the convolution's outputs choose the steps (PLaMo 2)."""

    heads: int
    head_dim: int
    states: int
    taps: int
    """Of the convolution."""
    rank: int
    """Numbers of which a token's time steps are made."""


@dataclass(frozen=True)
class RotatedLightningArch:
    """Layers of lightning attention whose heads are normed and rotated (Ring-linear)."""

    head_dim: int
    groups: int
    """Equal parts of what a layer makes, of which each is normed."""
    qk_norm: bool


@dataclass(frozen=True)
class RWKV7Arch:
    """Layers of RWKV-7; ranks are of the numbers by way of which others are made of a token."""

    head_dim: int
    decay_rank: int
    """Of how fast memories decay."""
    value_rank: int
    """Of what share values have of the first layer's."""
    rate_rank: int
    """Of how much of what a key says is replaced."""
    gate_rank: int


@dataclass(frozen=True)
class TwoMixersArch:
    """Layers in which attention and Mamba 2 mix tokens side by side, and by what each reads and gives is multiplied."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0


@dataclass(frozen=True)
class SharedBlocksArch:
    """Blocks of attention and an MLP that layers use in turn (Zamba 2)."""

    layers: tuple[int, ...]
    """Those that use one, in order: each turn the next block, and behind the last the first again."""
    count: int
    adapter_rank: int
    adapts_attention: bool
    """Whether each turn adds to q, k and v as well, and not only to gate and up."""


@dataclass(frozen=True)
class AlternatingArch:
    """A residual stream of several parts, of which layers compute one, and what else they are told (Gemma 3n)."""

    streams: int
    laurel_rank: int
    """Inner size of the linear layers beside attention."""
    token_vocab: int
    """Tokens that have a row for each layer."""
    token_size: int
    """Of such a row."""
    sparsity: tuple[float, ...]
    """By layer, the share of an MLP's gate that is cut off."""


@dataclass(frozen=True)
class HeadArch:
    """What a classifier makes of a text's vector, or of each token's: scores of classes."""

    classes: int
    of_tokens: bool = False
    """Whether each token is classified, and not the text."""
    pooling: str = "cls"
    """How a text's vector is made of its tokens': "cls" or "mean"."""
    dense: str | None = None
    """The activation behind a first matrix [H, H], a key of `quire.layers.activation.PLAIN`; None: there is none."""
    dense_bias: bool = True
    norm: bool = False
    """Whether what that gives is normed."""
    table: str = ""
    """The checkpoint's tensor of the last matrix, if it is another layer's, too: the table of tokens."""
    table_bias: str = ""
    """That of the bias then."""


@dataclass(frozen=True)
class MTPArch:
    """A layer more than a model's own, like the last of them, by which its checkpoint guesses the token after the next.

    Defaults are DeepSeek-V3's.
    """

    at: str = "model.layers.{layers}"
    """The layer's path; {layers} stands for the number of layers before it."""
    names: Mapping[str, str] = field(
        default_factory=lambda: {
            "enorm": "{at}.enorm",
            "hnorm": "{at}.hnorm",
            "eh_proj": "{at}.eh_proj",
            "head_norm": "{at}.shared_head.norm",
        }
    )
    """Other modules of `quire.models.draft_heads.mtp.MTPHead` -> their paths; {at} stands for the layer's."""
    is_counted: bool = True
    """Whether config.json says by `num_nextn_predict_layers` that it is there; else it always is."""
    mixer: str | None = None
    """How the layer mixes tokens, a key of `quire.models.blocks.MIXERS`; None: as the last one."""
    state_first: bool = False
    """Whether a state stands before the embedding that it is joined with."""
    reads_sums: bool = False
    """Whether it reads what comes into the target's last norm, and not what that gives."""
    gives_normed: bool = False
    """Whether the state behind a token is what the last of its norms gives."""

    def paths(self, num_layers: int) -> dict[str, str]:
        """What the checkpoint calls each module, where so many layers go before."""
        at = self.at.format(layers=num_layers)
        return {"block": at, **{name: path.format(at=at) for name, path in self.names.items()}}


@dataclass(frozen=True)
class DraftArch:
    """What guesses by the hidden states of another model, its target."""

    method: str
    """A key of `quire.models.draft_heads.reader.HEADS`."""
    count: int = 1
    """Heads, of which each guesses a token further on (Medusa)."""
    bias: bool = False
    """Whether what reads hidden states has one."""
    is_numbered: bool = False
    """Whether the checkpoint's modules have numbers in place of names (Medusa)."""
    reads: tuple[int, ...] = ()
    """Layers of the target of which it reads what comes in; none: it reads what the target's last norm gives."""
    vocab_size: int = 0
    """Rows of an output head of its own; 0: it has none."""
    has_offsets: bool = False
    """Whether the checkpoint maps the rows of that head to the target's tokens (`d2t`)."""
    adds_normed: bool = False
    """Whether what its layer is added to are normed states (EAGLE-3)."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer, in a model whose layers have different ones."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    block: str | None = None
    """How it is put together, where that differs as well; None: as `ModelArch` says."""


@dataclass(frozen=True)
class Skip:
    """What comes into layer `end` is mixed with what came into layer `start`, of which this share is taken."""

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
    dtype: str = "float32"
    """The checkpoint's."""
    eos_token_ids: tuple[int, ...] = ()
    """Those of config.json, then those that only generation_config.json names."""
    bos_token_id: int | None = None
    generation: dict[str, float] = field(default_factory=dict)
    """Default sampling parameters of generation_config.json, by `SamplingParams` field name."""
    names: CheckpointNames = field(default_factory=CheckpointNames)
    quantization: CheckpointQuantization | None = None
    """None where all weights are floats."""
    part_of: Multimodal | None = None
    """None where the checkpoint has nothing but a language model."""

    block: str = "sequential"
    """How a layer puts norms, attention and MLP together: a key of `quire.models.blocks.BLOCKS`."""
    first_block: str | None = None
    """The same of the first layer, where it differs."""
    blocks: Mapping[str, str] = field(default_factory=lambda: {"mlp": "mlp"})
    """The same of layers of some kinds, by what `layer_types` calls them, where it differs."""
    layer_shapes: tuple[LayerShape, ...] = ()
    """Of each layer, where they differ; then this record's own are the largest. None: all have these."""
    skips: tuple[Skip, ...] = ()
    """In the order in which those of one layer are taken."""
    norm: str = "rms"
    """"rms" or "layer"."""
    norm_eps: float = 1e-6
    final_norm_eps: float | None = None
    """Of the last norm, where it differs."""
    norm_offset: float = 0.0
    """What the checkpoint leaves out of the weights of its norms."""
    norm_offsets: Mapping[str, float] = field(default_factory=dict)
    """The same of some of a layer's norms, by our names, where it differs."""
    norm_weight: bool = True
    norm_bias: bool = True
    """Of layer norms; others have none."""
    residual_multiplier: float = 1.0
    stream_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """A kind of layers, or "mlp" -> what the stream, normed, and what they make of it are multiplied with."""

    tie_word_embeddings: bool = False
    embedding_multiplier: float | None = None
    embedding_norm: bool = False
    positions: str | None = None
    """What is added to the embeddings of tokens: a key of `quire.models.decoder.POSITIONS`."""
    position_offset: int = 0
    """Rows that stand unused at the start of the table of positions."""
    head_bias: bool = False
    head_of_unit_rows: bool = False
    """Whether the output head's rows are divided by their lengths."""
    logits_multiplier: float = 1.0
    final_logit_softcap: float | None = None

    attention_in_size: int | None = None
    """Of what q, k and v are made of, where it is not the hidden size."""
    attention_bias: bool = False
    """Of q, k and v."""
    attention_out_bias: bool = False
    attention_scale: float | None = None
    """What scores are multiplied with; None: one by the root of the head size."""
    attn_logit_softcap: float | None = None
    qkv_grouped: bool = False
    """Whether the checkpoint has q, k and v, or k and v, of each key-value head side by side, in one tensor."""
    qkv_blocks: int = 1
    """Equal parts of the heads, of which the checkpoint has queries, values and keys, in that order, side by side."""
    attention_experts: ExpertsArch | None = None
    """Those among the heads of attention, of which only number and routing are told; None: there are none."""
    qkv_clip: float | None = None
    attention_gate: bool = False
    """Whether what each head makes is weighted by the sigmoid of a gate, which the checkpoint has beside its query."""
    qk_norm: str | None = None
    """How q and k are normed: a key of `quire.layers.qk_norm.QK_NORMS`."""
    v_norm: bool = False
    """Whether values are normed, by heads and without weights."""
    unnormed_layers: tuple[int, ...] = ()
    """Those that have no norms of q and k all the same."""
    layer_types: tuple[str, ...] = ()
    """How each layer mixes tokens: a key of `quire.models.blocks.MIXERS`, or "mlp" if it is an MLP and mixes none."""
    mamba: MambaArch | None = None
    mamba2: Mamba2Arch | None = None
    headed_mamba: HeadedMambaArch | None = None
    short_conv: ShortConvArch | None = None
    delta: DeltaArch | None = None
    recurrent_unit: RecurrentUnitArch | None = None
    rotated_lightning: RotatedLightningArch | None = None
    rwkv7: RWKV7Arch | None = None
    two_mixers: TwoMixersArch | None = None
    alternating: AlternatingArch | None = None
    shared_blocks: SharedBlocksArch | None = None
    shared_kv: Mapping[int, int] = field(default_factory=dict)
    """Layers that have no keys and values -> the layer before them whose they read."""
    sliding_window: int | None = None
    attention_chunk: int | None = None
    attention_sinks: bool = False
    """Whether each head has a learned score that joins its softmax."""
    temperature: Temperature | None = None
    rope: RopeScaling | None = None
    """None where positions come in another way."""
    rope_local: RopeScaling | None = None
    """Of the layers with a window, or of lightning attention, where theirs differs."""
    unrotated_layers: tuple[int, ...] = ()
    alibi: float | None = None
    """What ALiBi's slopes are multiplied with; None where there is no ALiBi."""
    latent: LatentArch | None = None
    """None where attention keeps keys and values; else `head_dim` is the part of a head that is rotated."""

    mlp: str = "gated"
    """A key of `quire.models.blocks.MLPS`."""
    hidden_act: str = "silu"
    mlp_bias: bool = False
    mlp_out_bias: bool | None = None
    """Of what the MLP ends in; None: as `mlp_bias`."""
    gate_multiplier: float = 1.0
    """Of a gated MLP's gate, before its activation."""
    mlp_multiplier: float = 1.0
    """Of what a gated MLP gives."""
    up_first: bool = False
    """Whether a checkpoint that has gate and up in one tensor has up first."""
    transposed_weights: bool = False
    """Whether the checkpoint has matrices as [inputs, outputs], as GPT-2's Conv1D does."""
    experts: ExpertsArch | None = None

    bidirectional: bool = False
    """Whether tokens see those behind them, too: an encoder, which caches nothing and is given a text whole."""
    token_types: int = 0
    """Kinds of tokens, such as those of a first and a second text, with a learned vector each; 0: no such vectors."""
    relative_buckets: int = 0
    """Classes of distances, for each of which every head has learned what to add to a score; 0: there are none."""
    head: HeadArch | None = None

    do_layer_norm_before: bool = True
    final_norm: bool = True
    word_embed_proj_dim: int | None = None

    mtp: MTPArch = field(default_factory=MTPArch)
    """What its checkpoint may have beside it to guess by."""
    draft: DraftArch | None = None
    """Of what guesses for another model, and is none by itself."""
    kept_layers: tuple[int, ...] = ()
    """Layers of which what comes in stands, in order, behind the hidden states in a row, for heads to guess by.
    The last norm counts as one more."""

    foreign_config: str = ""
    """config.json itself, as JSON with overrides, of a model whose code reads it: one that transformers runs."""

    def of_layer(self, layer: int) -> ModelArch:
        """As one layer has it."""
        if not self.layer_shapes:
            return self
        shape = self.layer_shapes[layer]
        return replace(
            self,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
        )

    def block_of(self, layer: int) -> str:
        """How a layer is put together."""
        own = self.layer_shapes[layer].block if self.layer_shapes else None
        if own is not None:
            return own
        if layer == 0 and self.first_block is not None:
            return self.first_block
        return self.blocks.get(self.layer_types[layer], self.block)

    def mlp_of(self, layer: int) -> str:
        """The kind of a layer's MLP."""
        return "sparse" if self.experts is not None and layer in self.experts.layers else self.mlp

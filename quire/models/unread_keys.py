"""Report of keys in config.json that nothing here reads.

Invariant: torch-free. A key is either read by a family, which honours or refuses it, known to change nothing that is
computed at inference, or named in the log. Tests hold that the first two are so of every key that transformers reads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

from quire.models.json_object import JsonObject

logger = logging.getLogger(__name__)

HARMLESS = re.compile(
    "|".join(
        (
            # training
            r".*(drop|jitter|loss|aux|init|pretraining|z_coef|label_smoothing).*|w_init.*|.*_std(_dev)?|rescale_.*",
            r"altup_coef_clip|embedding_fraction|time_step_(min|max|floor|scale|rank)|lambda_std_dev",
            # tasks other than generation, and what pooling reads by itself
            r".*label.*|num_classes|problem_type|summary_.*|classifier_.*|.*matryoshka.*|sbert_.*|sentence_.*|method",
            r"finetuning_task|task_specific_params|prompt_.*|sep_token.*|cls_token.*|mask_token.*|.*_token_ids?",
            r".*_token_index|tokenizer_class|decoder_start.*|forced_.*|suppress_tokens|begin_suppress_tokens",
            # outputs, caches and implementations
            r"output_.*|return_.*|use_return_dict|(no_)?use_cache|use_(mamba_kernels|mambapy|associative_scan)",
            r"use_mem_eff_path|use_flash.*|use_bfloat16|torchscript|(mamba_)?chunk_size|chunk_size_feed_forward",
            r"num_logits_to_keep|(moe|mamba)_\w*(overlap|cache_dtype)|init_device|.*_implementation|gradient_.*",
            r"reorder_and_upcast_attn|(scale_)?attention_softmax_in_fp32|residual_in_fp32|slow_but_exact|block_size",
            r"is_decoder|tie_encoder_decoder|attn_config|cache_implementation|ep_size|masked_softmax_fusion",
            # generation defaults, which generation_config.json has
            r"max_length|min_length|do_sample|num_beams\w*|diversity_penalty|length_penalty|temperature|top_[kp]",
            r"typical_p|repetition_penalty|no_repeat_ngram_size|\w*_no_repeat_ngram_size|bad_words_ids|early_stopping",
            r"num_return_sequences|exponential_decay_\w+|remove_invalid_values|begin_\w+|encoder_\w+|cross_\w+",
            # sizes and biases, which tensors confirm, and what counts under another key only
            r"(qk_|attention_)?head_dim|attention_hidden_size|hybrid_layer_ids|kv_channels|mamba_headdim|n_ctx",
            r"num_(query_groups|kv_heads|key_value_heads|ln_in_parallel_attn|experts_per_tok|local_experts)",
            r"(attention|mlp|decoder|use)_bias|intermediate_size|multi_query|attention_layers|linear_\w+",
            r"rope_\w+|original_max_position_embeddings|layer_types|max_window_layers|(use_)?sliding_window(_pattern)?",
            r"mamba_norm_before_gate|learned_pos_emb|tie_word_embeddings|sinusoidal_pos_embds|sparse_\w+|deterministic_\w+",
            # other parts of the checkpoint
            r"(vision|audio|image|video|speech|mm|projector|text)_.*|.*(vision|audio|image|video)_config|mtp_.*",
            r"num_(mtp|nextn_predict)_layers|.*_nextn_.*|(multimodal_)?projector_.*|spatial_\w+|quantization_config",
            # who wrote the file
            r"_.*|model_type|architectures|auto_map|transformers_\w+|torch_dtype|dtype|unsloth_\w+|.*_version|name",
        )
    )
)
"""Keys that change nothing here, whatever their value."""
_MOST_NAMED = 12


def report_unread(config: JsonObject, overrides: Collection[str]) -> None:
    """Log the keys of a config, read to its end, that were not asked for and are not known to change nothing.

    Args:
        overrides: keys that --hf-overrides gave, of which a warning is due; the file's are told for information.
    """
    unread = sorted(
        key
        for key, value in config.values.items()
        if key not in config.asked and value not in (None, {}, []) and not HARMLESS.fullmatch(key)
    )
    given = [key for key in unread if key in overrides]
    if given:
        logger.warning("--hf-overrides: %s: nothing reads this of %s", ", ".join(given), config.where)
    rest = [key for key in unread if key not in overrides]
    if rest:
        more = "" if len(rest) <= _MOST_NAMED else f" and {len(rest) - _MOST_NAMED} more"
        logger.info("%s: not read: %s%s", config.where, ", ".join(rest[:_MOST_NAMED]), more)

# SPDX-License-Identifier: Apache-2.0
"""Causal language models of transformers without a row in `BUILT_IN`: which run with its code, and which are refused.

Invariant: data only, for docs/models.md; the tests build and run each, and check that there are no others.
"""

from __future__ import annotations

_OWN = "it has its own attention code, outside transformers' attention interface"
_CHOOSES = "it selects the tokens to attend to from data"
_BIASES = "its attention adds biases to scores other than a mask"
_KINDS = "it has attention, or layers, of a kind that the KV cache does not support"
_STATES = "it mixes tokens without attention, by convolutions or states"
_PARTS = "it is multimodal, or consists of several models"
_OTHER_WAYS = "its decoder has cross-attention, or is not declared causal"
_DATA = "its control flow depends on tensor data"
_COMPUTED = "its checkpoints store tensors that are converted on loading, or under several names"

RUN: tuple[str, ...] = (
    "AriaTextForCausalLM",
    "AXK1ForCausalLM",
    "BartForCausalLM",
    "BeamForCausalLM",
    "BertGenerationDecoder",
    "BertLMHeadModel",
    "BioGptForCausalLM",
    "BitNetForCausalLM",
    "BlenderbotForCausalLM",
    "BlenderbotSmallForCausalLM",
    "CamembertForCausalLM",
    "Cohere2MoeForCausalLM",
    "CohereCompassForCausalLM",
    "CTRLLMHeadModel",
    "Data2VecTextForCausalLM",
    "ElectraForCausalLM",
    "ErnieForCausalLM",
    "FlintForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteSWAForCausalLM",
    "HYV3ForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "LongcatFlashForCausalLM",
    "MarianForCausalLM",
    "MBartForCausalLM",
    "MellumForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "ModernBertDecoderForCausalLM",
    "PegasusForCausalLM",
    "PLBartForCausalLM",
    "RobertaForCausalLM",
    "RobertaPreLayerNormForCausalLM",
    "RoCBertForCausalLM",
    "WhisperForCausalLM",
    "XLMRobertaForCausalLM",
    "XLMRobertaXLForCausalLM",
)
"""Architectures, in alphabetical order."""

REFUSED: dict[str, str] = {
    "AXK2ForCausalLM": _CHOOSES,
    "BigBirdForCausalLM": _OWN,
    "BigBirdPegasusForCausalLM": _OTHER_WAYS,
    "BltForCausalLM": _PARTS,
    "CpmAntForCausalLM": _BIASES,
    "DeepseekV32ForCausalLM": _CHOOSES,
    "DeepseekV4ForCausalLM": _KINDS,
    "DogeForCausalLM": _BIASES,
    "Dots3NoteForCausalLM": _CHOOSES,
    "Emu3ForCausalLM": _PARTS,
    "FuyuForCausalLM": _PARTS,
    "Gemma4AssistantForCausalLM": _PARTS,
    "Gemma4UnifiedAssistantForCausalLM": _PARTS,
    "Gemma4UnifiedForConditionalGeneration": _PARTS,
    "GitForCausalLM": _PARTS,
    "GlmMoeDsaForCausalLM": _CHOOSES,
    "GotOcr2ForConditionalGeneration": _PARTS,
    "GPTNeoXJapaneseForCausalLM": _OWN,
    "HrmTextForCausalLM": _COMPUTED,
    "HYV4ForCausalLM": _CHOOSES,
    "Inkling2ForCausalLM": _BIASES,
    "InklingForCausalLM": _BIASES,
    "Lfm3ForCausalLM": _STATES,
    "MegatronBertForCausalLM": _OWN,
    "MllamaForCausalLM": _PARTS,
    "MoshiForCausalLM": _PARTS,
    "MossTranscribeDiarizeForConditionalGeneration": _PARTS,
    "MusicgenForCausalLM": _PARTS,
    "MusicgenMelodyForCausalLM": _PARTS,
    "MvpForCausalLM": _OWN,
    "OpenAIGPTLMHeadModel": _OWN,
    "ProphetNetForCausalLM": _OTHER_WAYS,
    "Qwen4ExpForCausalLM": _OWN,
    "ReformerModelWithLMHead": _OWN,
    "RemBertForCausalLM": _OWN,
    "RoFormerForCausalLM": _OWN,
    "RwkvForCausalLM": _STATES,
    "TrOCRForCausalLM": _OWN,
    "XLMWithLMHeadModel": _OWN,
    "XLNetLMHeadModel": _OTHER_WAYS,
    "xLSTMForCausalLM": _STATES,
    "XmodForCausalLM": _DATA,
    "ZambaForCausalLM": _COMPUTED,
    "ZayaForCausalLM": _KINDS,
}
"""Architecture -> why it is refused, for users; in alphabetical order."""

# SPDX-License-Identifier: Apache-2.0
"""Table of architectures that quire implements.

Invariant: data only; docs/models.md and the parametrized family tests are generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass

DECODER = "decoder:DecoderForCausalLM"
TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class BuiltIn:
    """Architecture of `quire.models`."""

    architecture: str
    """Name in checkpoints."""
    reader: str
    """Reader of its config.json: "file:function" in `families/`."""
    models: str
    """Well-known models, for the docs."""
    model: str = DECODER
    """Model class: "file:Class" in `quire.models`."""
    oracle: str = TRANSFORMERS
    """Reference for its logits in tests: the class of transformers with its name, or what is named here."""
    pools: bool = False
    """True for pooling models, which generate nothing."""
    bidirectional_decoder: bool = False
    """True if it is also served as an encoder where config.json says so (`is_causal`)."""


ENCODER = "encoder:EncoderModel"
_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
"""Heads with which encoders are published; a masked-language-model head is skipped."""


@dataclass(frozen=True)
class EncoderFamily:
    """Encoders that differ only in their heads."""

    name: str
    """Class name in checkpoints without the head's suffix."""
    reader: str
    models: str
    heads: tuple[str, ...] = _HEADS
    oracle: str = TRANSFORMERS

    def rows(self) -> list[BuiltIn]:
        """Return an architecture for each head."""
        return [
            BuiltIn(self.name + head, self.reader, self.models, ENCODER, self.oracle, pools=True)
            for head in self.heads
        ]


BUILT_IN: dict[str, BuiltIn] = {
    row.architecture: row
    for row in (
        BuiltIn("AfmoeForCausalLM", "experts:read_afmoe", "Trinity Nano, Mini and Large"),
        BuiltIn("ApertusForCausalLM", "llama_like:read_apertus", "Apertus"),
        BuiltIn("AquilaForCausalLM", "llama:read_llama", "Aquila 2", oracle="Llama of transformers"),
        BuiltIn("ArceeForCausalLM", "llama:read_arcee", "AFM 4.5B"),
        BuiltIn("ArcticForCausalLM", "experts:read_arctic", "Snowflake Arctic", oracle="plain torch"),
        BuiltIn(
            "BaiChuanForCausalLM", "llama_like:read_baichuan", "Baichuan 7B", oracle="Llama of transformers"
        ),
        BuiltIn(
            "BaichuanForCausalLM",
            "llama_like:read_baichuan",
            "Baichuan 2 7B and 13B, Baichuan 13B",
            oracle="Llama of transformers, with ALiBi's biases as a mask",
        ),
        BuiltIn("BailingHybridForCausalLM", "linear_attention:read_bailing_hybrid", "Ling 3.0"),
        BuiltIn(
            "BailingMoeForCausalLM",
            "linear_attention:read_bailing",
            "Ling lite and plus",
            oracle="plain torch",
        ),
        BuiltIn(
            "BailingMoeLinearV2ForCausalLM",
            "linear_attention:read_bailing_linear",
            "Ring-mini-linear 2.0, Ring-flash-linear 2.0",
            oracle="plain torch",
        ),
        BuiltIn(
            "BailingMoeV2_5ForCausalLM",
            "linear_attention:read_bailing_v2_5",
            "Ling 2.5",
            oracle="plain torch",
        ),
        BuiltIn(
            "BailingMoeV2ForCausalLM",
            "linear_attention:read_bailing_v2",
            "Ling 2.0 mini and flash, Ring 2.0",
            oracle="Glm4Moe of transformers",
        ),
        BuiltIn("BambaForCausalLM", "mamba:read_bamba", "Bamba 9B"),
        BuiltIn("BloomForCausalLM", "gpt2:read_bloom", "BLOOM, BLOOMZ"),
        BuiltIn(
            "ChatGLMForConditionalGeneration",
            "deepseek:read_chatglm",
            "GLM-4 9B (2024) as published",
            oracle="Glm of transformers",
        ),
        BuiltIn(
            "ChatGLMModel",
            "deepseek:read_chatglm",
            "ChatGLM 2 and 3, GLM-4 9B (2024) as published",
            oracle="Glm of transformers",
        ),
        BuiltIn("CodeGenForCausalLM", "gpt2:read_codegen", "CodeGen 350M to 16B"),
        BuiltIn("Cohere2ForCausalLM", "llama_like:read_cohere2", "Command A, Command R7B, Tiny Aya"),
        BuiltIn("CohereForCausalLM", "llama_like:read_cohere", "Command R, Command R+, Aya 23 and Expanse"),
        BuiltIn("CwmForCausalLM", "llama_like:read_cwm", "Code World Model"),
        BuiltIn("DbrxForCausalLM", "experts:read_dbrx", "DBRX"),
        BuiltIn(
            "DeciLMForCausalLM",
            "uneven:read_decilm",
            "DeciLM 7B, Llama Nemotron Super 49B and Ultra 253B",
            oracle="plain torch",
        ),
        BuiltIn("DeepseekForCausalLM", "deepseek:read_deepseek_moe", "DeepSeekMoE 16B", oracle="plain torch"),
        BuiltIn("DeepseekV2ForCausalLM", "deepseek:read_deepseek_v2", "DeepSeek-V2, V2 Lite, V2.5, Coder V2"),
        BuiltIn("DeepseekV3ForCausalLM", "deepseek:read_deepseek_v3", "DeepSeek-V3, V3.1, R1, Kimi K2"),
        BuiltIn("DiffLlamaForCausalLM", "llama_like:read_diffllama", "DiffLlama 0.3B"),
        BuiltIn("Dots1ForCausalLM", "experts:read_dots1", "dots.llm1"),
        BuiltIn("Ernie4_5_MoeForCausalLM", "experts:read_ernie_moe", "ERNIE 4.5 21B-A3B and 300B-A47B"),
        BuiltIn("Ernie4_5ForCausalLM", "llama_like:read_ernie", "ERNIE 4.5 0.3B"),
        BuiltIn("Exaone4ForCausalLM", "exaone:read_exaone4", "EXAONE 4"),
        BuiltIn(
            "ExaoneForCausalLM",
            "exaone:read_exaone",
            "EXAONE 3, 3.5 and Deep",
            oracle="Llama of transformers",
        ),
        BuiltIn("ExaoneMoeForCausalLM", "exaone:read_exaone_moe", "K-EXAONE"),
        BuiltIn("FalconForCausalLM", "gpt2:read_falcon", "Falcon 1B, 7B, 40B, 180B and 2 11B"),
        BuiltIn("FalconH1ForCausalLM", "mamba:read_falcon_h1", "Falcon-H1 0.5B to 34B"),
        BuiltIn("FalconMambaForCausalLM", "mamba:read_falcon_mamba", "Falcon Mamba 7B"),
        BuiltIn("FlexOlmoForCausalLM", "experts:read_flex_olmo", "FlexOlmo"),
        BuiltIn("Gemma2ForCausalLM", "gemma:read_gemma2", "Gemma 2"),
        BuiltIn("Gemma3ForCausalLM", "gemma:read_gemma3", "Gemma 3 (text)"),
        BuiltIn(
            "Gemma3nForCausalLM",
            "gemma:read_gemma3n",
            "Gemma 3n E2B and E4B (text)",
            model="gemma3n:Gemma3nForCausalLM",
        ),
        BuiltIn(
            "Gemma4ForCausalLM",
            "gemma:read_gemma4",
            "Gemma 4 E2B, E4B, 26B-A4B and 31B (text)",
            model="gemma4:Gemma4ForCausalLM",
        ),
        BuiltIn("GemmaForCausalLM", "gemma:read_gemma", "Gemma, CodeGemma"),
        BuiltIn("Glm4ForCausalLM", "deepseek:read_glm4", "GLM-4 (0414), GLM-Z1"),
        BuiltIn("Glm4MoeForCausalLM", "experts:read_glm4_moe", "GLM 4.5, 4.6 and 4.7"),
        BuiltIn("Glm4MoeLiteForCausalLM", "deepseek:read_glm4_moe_lite", "GLM 4.7 Flash"),
        BuiltIn("GlmForCausalLM", "deepseek:read_glm", "GLM-4 9B, GLM-Edge"),
        BuiltIn("GPT2LMHeadModel", "gpt2:read_gpt2", "GPT-2, Cerebras-GPT"),
        BuiltIn("GPTBigCodeForCausalLM", "gpt2:read_gpt_bigcode", "StarCoder, SantaCoder"),
        BuiltIn("GPTJForCausalLM", "gpt2:read_gptj", "GPT-J"),
        BuiltIn("GPTNeoForCausalLM", "gpt2:read_gpt_neo", "GPT-Neo, TinyStories"),
        BuiltIn("GPTNeoXForCausalLM", "gpt2:read_gpt_neox", "GPT-NeoX, Pythia, Dolly 2, RedPajama-INCITE"),
        BuiltIn("GptOssForCausalLM", "experts:read_gpt_oss", "gpt-oss 20B and 120B"),
        BuiltIn("GraniteForCausalLM", "granite:read_granite", "Granite 3"),
        BuiltIn("GraniteMoeForCausalLM", "granite:read_granite_moe", "Granite 3 1B-A400M and 3B-A800M"),
        BuiltIn("GraniteMoeHybridForCausalLM", "mamba:read_granite_hybrid", "Granite 4"),
        BuiltIn(
            "GraniteMoeSharedForCausalLM", "granite:read_granite_moe", "Granite 3 MoE with a shared expert"
        ),
        BuiltIn("HeliumForCausalLM", "llama_like:read_helium", "Helium 1"),
        BuiltIn("HunYuanDenseV1ForCausalLM", "olmo:read_hunyuan", "Hunyuan 0.5B to 7B"),
        BuiltIn("HunYuanMoEV1ForCausalLM", "experts:read_hunyuan_moe", "Hunyuan A13B"),
        BuiltIn("HyperCLOVAXForCausalLM", "granite:read_hyperclovax", "HyperCLOVA X SEED"),
        BuiltIn(
            "InternLM2ForCausalLM",
            "llama_like:read_internlm2",
            "InternLM 2 and 2.5",
            oracle="Llama of transformers",
        ),
        BuiltIn(
            "InternLM3ForCausalLM", "llama_like:read_internlm3", "InternLM 3", oracle="Llama of transformers"
        ),
        BuiltIn(
            "InternLMForCausalLM", "llama_like:read_internlm", "InternLM", oracle="Llama of transformers"
        ),
        BuiltIn("Jais2ForCausalLM", "gpt2:read_jais2", "Jais 2"),
        BuiltIn("JAISLMHeadModel", "gpt2:read_jais", "Jais 13B and 30B", oracle="plain torch"),
        BuiltIn("JambaForCausalLM", "mamba:read_jamba", "Jamba, Jamba 1.5 to 1.7, Jamba Reasoning 3B"),
        BuiltIn("JetMoeForCausalLM", "experts:read_jetmoe", "JetMoE 8B"),
        BuiltIn("KimiLinearForCausalLM", "linear_attention:read_kimi_linear", "Kimi Linear 48B-A3B"),
        BuiltIn("Lfm2ForCausalLM", "linear_attention:read_lfm2", "LFM2 350M to 2.6B"),
        BuiltIn("Lfm2MoeForCausalLM", "linear_attention:read_lfm2_moe", "LFM2 8B-A1B"),
        BuiltIn("Llama4ForCausalLM", "experts:read_llama4", "Llama 4 Scout and Maverick (text)"),
        BuiltIn(
            "LlamaForCausalLM",
            "llama:read_llama",
            "Llama 1 to 3.3, Yi, DeepSeek-LLM, SOLAR, TinyLlama, SmolLM 2",
            bidirectional_decoder=True,
        ),
        BuiltIn("Mamba2ForCausalLM", "mamba:read_mamba2", "Mamba 2, Codestral Mamba"),
        BuiltIn("MambaForCausalLM", "mamba:read_mamba", "Mamba 130M to 2.8B"),
        BuiltIn("MiMoForCausalLM", "qwen:read_mimo", "MiMo 7B", oracle="Qwen2 of transformers"),
        BuiltIn("MiniCPM3ForCausalLM", "deepseek:read_minicpm3", "MiniCPM 3 4B"),
        BuiltIn(
            "MiniCPMForCausalLM",
            "llama_like:read_minicpm",
            "MiniCPM 1 and 2, MiniCPM 4 without sparse attention",
            oracle="Granite of transformers",
        ),
        BuiltIn(
            "MiniMaxForCausalLM",
            "linear_attention:read_minimax",
            "MiniMax-Text-01 in the form of transformers",
        ),
        BuiltIn("MiniMaxM2ForCausalLM", "linear_attention:read_minimax_m2", "MiniMax M2 and M2.1"),
        BuiltIn(
            "MiniMaxText01ForCausalLM",
            "linear_attention:read_minimax_text_01",
            "MiniMax-Text-01 and M1 as published",
            oracle="MiniMax of transformers",
        ),
        BuiltIn("Ministral3ForCausalLM", "llama_like:read_ministral3", "Ministral 3 3B to 14B (text)"),
        BuiltIn("MinistralForCausalLM", "llama:read_ministral", "Ministral 8B"),
        BuiltIn(
            "MistralForCausalLM", "llama:read_mistral", "Mistral 7B, Nemo, Small", bidirectional_decoder=True
        ),
        BuiltIn("MixtralForCausalLM", "experts:read_mixtral", "Mixtral 8x7B and 8x22B"),
        BuiltIn(
            "MPTForCausalLM", "gpt2:read_mpt", "MPT 7B and 30B as published", oracle="Mpt of transformers"
        ),
        BuiltIn("MptForCausalLM", "gpt2:read_mpt", "MPT 7B and 30B in the form of transformers"),
        BuiltIn("NanoChatForCausalLM", "llama_like:read_nanochat", "nanochat"),
        BuiltIn("NemotronForCausalLM", "gpt2:read_nemotron", "Nemotron 4, Minitron"),
        BuiltIn(
            "NemotronHForCausalLM",
            "mamba:read_nemotron_h",
            "Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano and Super",
        ),
        BuiltIn("Olmo2ForCausalLM", "olmo:read_olmo2", "OLMo 2"),
        BuiltIn("Olmo3ForCausalLM", "olmo:read_olmo3", "OLMo 3"),
        BuiltIn("OlmoeForCausalLM", "experts:read_olmoe", "OLMoE 1B-7B"),
        BuiltIn("OlmoForCausalLM", "olmo:read_olmo", "OLMo"),
        BuiltIn("OlmoHybridForCausalLM", "olmo:read_olmo_hybrid", "OLMo Hybrid 7B"),
        BuiltIn("OpenELMForCausalLM", "uneven:read_openelm", "OpenELM 270M to 3B", oracle="plain torch"),
        BuiltIn("OPTForCausalLM", "gpt2:read_opt", "OPT", model="opt:OPTForCausalLM"),
        BuiltIn("OrionForCausalLM", "llama:read_orion", "Orion 14B", oracle="StableLm of transformers"),
        BuiltIn("PersimmonForCausalLM", "gpt2:read_persimmon", "Persimmon 8B"),
        BuiltIn("Phi3ForCausalLM", "gpt2:read_phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
        BuiltIn("PhiForCausalLM", "gpt2:read_phi", "Phi-1, Phi-1.5, Phi-2"),
        BuiltIn("PhimoeForCausalLM", "gpt2:read_phimoe", "Phi-3.5-MoE"),
        BuiltIn("Plamo2ForCausalLM", "mamba:read_plamo2", "PLaMo 2 1B and 8B", oracle="plain torch"),
        BuiltIn(
            "Qwen2ForCausalLM", "qwen:read_qwen2", "Qwen 1.5, 2 and 2.5, QwQ", bidirectional_decoder=True
        ),
        BuiltIn("Qwen2MoeForCausalLM", "experts:read_qwen2_moe", "Qwen 1.5 MoE A2.7B, Qwen 2 57B-A14B"),
        BuiltIn("Qwen3_5ForCausalLM", "qwen:read_qwen3_5", "Qwen 3.5 (text)"),
        BuiltIn("Qwen3_5MoeForCausalLM", "qwen:read_qwen3_5_moe", "Qwen 3.5 with experts (text)"),
        BuiltIn("Qwen3ForCausalLM", "qwen:read_qwen3", "Qwen 3", bidirectional_decoder=True),
        BuiltIn(
            "Qwen3MoeForCausalLM", "experts:read_qwen3_moe", "Qwen 3 30B-A3B and 235B-A22B, Qwen 3 Coder"
        ),
        BuiltIn("Qwen3NextForCausalLM", "qwen:read_qwen3_next", "Qwen3-Next 80B-A3B, Qwen3 Coder Next"),
        BuiltIn("QWenLMHeadModel", "qwen:read_qwen", "Qwen (2023)", oracle="Qwen2 of transformers"),
        BuiltIn("RecurrentGemmaForCausalLM", "gemma:read_recurrent_gemma", "RecurrentGemma 2B and 9B"),
        BuiltIn(
            "RWKV7ForCausalLM",
            "linear_attention:read_rwkv7",
            "RWKV-7 in the form of flash-linear-attention",
            model="rwkv7:RWKV7ForCausalLM",
            oracle="plain torch",
        ),
        BuiltIn("SeedOssForCausalLM", "llama:read_seed_oss", "Seed-OSS 36B"),
        BuiltIn("SmolLM3ForCausalLM", "llama:read_smollm3", "SmolLM 3"),
        BuiltIn("SolarForCausalLM", "llama_like:read_solar", "Solar Pro", oracle="plain torch"),
        BuiltIn("SolarOpenForCausalLM", "experts:read_solar_open", "Solar Open 100B"),
        BuiltIn(
            "StableLMEpochForCausalLM",
            "gpt2:read_stablelm",
            "StableLM 3B as published",
            oracle="StableLm of transformers",
        ),
        BuiltIn("StableLmForCausalLM", "gpt2:read_stablelm", "StableLM 2, StableLM 3B, Stable Code"),
        BuiltIn("Starcoder2ForCausalLM", "gpt2:read_starcoder2", "StarCoder 2"),
        BuiltIn(
            "TeleChat2ForCausalLM", "llama_like:read_telechat", "TeleChat 2 3B to 115B", oracle="plain torch"
        ),
        BuiltIn(
            "TelechatForCausalLM", "llama_like:read_telechat", "TeleChat 7B and 12B", oracle="plain torch"
        ),
        BuiltIn("VaultGemmaForCausalLM", "gemma:read_vaultgemma", "VaultGemma 1B"),
        BuiltIn("XGLMForCausalLM", "gpt2:read_xglm", "XGLM"),
        BuiltIn("XverseForCausalLM", "llama:read_llama", "XVERSE 7B to 65B", oracle="Llama of transformers"),
        BuiltIn("YoutuForCausalLM", "deepseek:read_youtu", "Youtu-LLM 2B"),
        BuiltIn(
            "Zamba2ForCausalLM", "mamba:read_zamba2", "Zamba 2 1.2B to 7B", model="zamba2:Zamba2ForCausalLM"
        ),
    )
}
"""Rows by architecture, in alphabetical order."""

ALSO_CALLED: dict[str, str] = {
    "AquilaModel": "AquilaForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxText01ForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
"""Published architecture name -> name of its row."""

ENCODER_FAMILIES = (
    EncoderFamily(
        "Bert",
        "bert:read_bert",
        "BERT, MiniLM, E5, BGE, GTE (2023), MXBAI, Snowflake Arctic Embed",
        heads=(*_HEADS, "ForPreTraining"),
    ),
    EncoderFamily("Camembert", "bert:read_roberta", "CamemBERT"),
    EncoderFamily("DistilBert", "bert:read_distilbert", "DistilBERT"),
    EncoderFamily("Gemma3Text", "gemma:read_gemma3", "EmbeddingGemma", heads=("Model",)),
    EncoderFamily("Gte", "bert:read_gte", "GTE multilingual in the form of transformers"),
    EncoderFamily("JinaEmbeddingsV3", "bert:read_jina_v3", "Jina embeddings v3 without adapters"),
    EncoderFamily("ModernBert", "bert:read_modern_bert", "ModernBERT, GTE ModernBERT, Nomic Embed on it"),
    EncoderFamily("MPNet", "bert:read_mpnet", "MPNet, all-mpnet-base"),
    EncoderFamily(
        "New", "bert:read_gte", "GTE v1.5 and multilingual as published", oracle="Gte of transformers"
    ),
    EncoderFamily("NomicBert", "bert:read_nomic_bert", "Nomic Embed v1 and v1.5"),
    EncoderFamily("Roberta", "bert:read_roberta", "RoBERTa"),
    EncoderFamily("XLMRoberta", "bert:read_roberta", "XLM-RoBERTa, BGE-M3, multilingual E5"),
)

ENCODERS: dict[str, BuiltIn] = {row.architecture: row for family in ENCODER_FAMILIES for row in family.rows()}
"""Encoders by architecture; they pool and do not generate."""

_CROSSING = "encoder_decoder:EncoderDecoder"
PARTS: dict[str, BuiltIn] = {
    row.architecture: row
    for row in (
        BuiltIn(name, reader, f"{models}, inside `quire.models.multimodal.WRAPPERS`", _CROSSING)
        for name, reader, models in (
            ("BartDecoder", "bart:read_bart", "BART"),
            ("M2M100Decoder", "bart:read_m2m100", "M2M-100"),
            ("MBartDecoder", "bart:read_mbart", "mBART"),
            ("MarianDecoder", "bart:read_marian", "Marian"),
            ("PegasusDecoder", "bart:read_pegasus", "Pegasus"),
            ("T5Decoder", "t5:read_t5", "T5"),
            ("TrOCRDecoder", "bart:read_trocr", "TrOCR"),
            ("UMT5Decoder", "t5:read_umt5", "UMT5"),
            ("WhisperDecoder", "whisper:read_whisper", "Whisper"),
        )
    )
}
"""Models that are served only as a part of a whole checkpoint, which names another architecture."""

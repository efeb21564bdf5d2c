"""Architectures of transformers and timm in tiny sizes, whose blocks make_reversible takes as they are."""

import inspect

import torch


def words(text):
    return text.split()


LANGUAGE = words(
    """
    AfmoeForCausalLM Apertus1p5TextForCausalLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM BambaForCausalLM
    BartForCausalLM BeamForCausalLM BertGenerationDecoder BertLMHeadModel BigBirdForCausalLM BigBirdPegasusForCausalLM
    BioGptForCausalLM BitNetForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM BloomForCausalLM
    CamembertForCausalLM CodeGenForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM CTRLLMHeadModel
    CwmForCausalLM Data2VecTextForCausalLM DeepseekV4ForCausalLM DiffLlamaForCausalLM DogeForCausalLM DoryForCausalLM
    Dots1ForCausalLM ElectraForCausalLM Emu3ForCausalLM Ernie4_5_MoeForCausalLM Ernie4_5ForCausalLM ErnieForCausalLM
    Exaone4ForCausalLM ExaoneMoeForCausalLM FalconForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM
    FlintForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma4UnifiedForCausalLM GemmaForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM GlmForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM
    GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM GraniteSWAForCausalLM HeliumForCausalLM HrmTextForCausalLM
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM HYV3ForCausalLM HYV4ForCausalLM
    InklingForCausalLM Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM LagunaForCausalLM LaraMiniForCausalLM
    Lfm2ForCausalLM Lfm3ForCausalLM Llama4ForCausalLM LlamaForCausalLM MambaForCausalLM MarianForCausalLM
    MBartForCausalLM MegatronBertForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM MiniMaxForCausalLM
    MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM
    MixtralForCausalLM MllamaForCausalLM ModernBertDecoderForCausalLM MoshiForCausalLM MptForCausalLM MvpForCausalLM
    NanoChatForCausalLM NemotronForCausalLM NemotronHForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM
    OlmoForCausalLM OlmoHybridForCausalLM OPTForCausalLM PegasusForCausalLM PersimmonForCausalLM Phi3ForCausalLM
    PhiForCausalLM PhimoeForCausalLM PLBartForCausalLM ProphetNetForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    RecurrentGemmaForCausalLM RemBertForCausalLM RobertaForCausalLM RobertaPreLayerNormForCausalLM RoFormerForCausalLM
    RwkvForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
    TrOCRForCausalLM VaultGemmaForCausalLM WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM
    XLMRobertaXLForCausalLM XLNetLMHeadModel xLSTMForCausalLM
    """
)

MASKED = words(
    """
    ConvBertForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM DistilBertForMaskedLM EsmForMaskedLM EuroBertForMaskedLM
    FNetForMaskedLM GteForMaskedLM IBertForMaskedLM JinaEmbeddingsV3ForMaskedLM LayoutLMForMaskedLM
    LongformerForMaskedLM ModernBertForMaskedLM MPNetForMaskedLM MraForMaskedLM NomicBertForMaskedLM
    NystromformerForMaskedLM TapasForMaskedLM UltrabertForMaskedLM YosoForMaskedLM
    """
)

PAIRS = words(
    """
    LongT5ForConditionalGeneration MT5ForConditionalGeneration T5ForConditionalGeneration UMT5ForConditionalGeneration
    SwitchTransformersForConditionalGeneration M2M100ForConditionalGeneration
    """
)

IMAGES = words(
    """
    BeitForImageClassification Data2VecVisionForImageClassification DeiTForImageClassification
    Dinov2ForImageClassification Dinov2WithRegistersForImageClassification IJepaForImageClassification
    ImageGPTForImageClassification ViTForImageClassification ViTMSNForImageClassification
    """
)

SPEECH = words(
    """
    Data2VecAudioForCTC HubertForCTC SEWForCTC UniSpeechForCTC Wav2Vec2ForCTC Wav2Vec2ConformerForCTC WavLMForCTC
    """
)

TIMM = {
    "test_vit": (64, True, ["blocks"]),
    "test_vit_relpos": (64, True, ["blocks"]),
    "test_convnext": (96, False, ["stages.1.blocks", "stages.2.blocks", "stages.3.blocks"]),
    "test_mambaout": (96, False, ["stages.2.blocks"]),
    "convit_tiny": (64, True, ["blocks"]),
    "deit_tiny_patch16_224": (64, True, ["blocks"]),
    "eva02_tiny_patch14_224": (56, True, ["blocks"]),
    "visformer_tiny": (64, True, ["stage1", "stage2", "stage3"]),
    "xcit_nano_12_p8_224": (64, True, ["blocks", "cls_attn_blocks"]),
    "cait_xxs24_224": (64, True, ["blocks[1:]"]),
    "pit_xs_224": (224, False, ["transformers.0.blocks", "transformers.1.blocks", "transformers.2.blocks"]),
    "pvt_v2_b0": (64, False, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks", "stages.3.blocks"]),
    "edgenext_xx_small": (96, False, ["stages.0.blocks"]),
    "efficientformer_l1": (224, False, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks"]),
    "fasternet_t0": (64, False, ["stages.1.blocks", "stages.2.blocks", "stages.3.blocks"]),
    "gcvit_xxtiny": (64, True, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks", "stages.3.blocks"]),
    "inception_next_atto": (96, False, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks", "stages.3.blocks"]),
    "mobilevit_xxs": (96, True, ["stages.1[1:]", "stages.3.1.transformer[1:]", "stages.4.1.transformer[1:]"]),
    "tiny_vit_5m_224": (64, False, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks", "stages.3.blocks"]),
    "repvit_m0_9": (96, True, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks", "stages.3.blocks"]),
    "shvit_s1": (96, False, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks"]),
    "poolformer_s12": (64, False, ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks", "stages.3.blocks"]),
    "iformer_s": (96, False, ["stages.0.blocks", "stages.1.blocks"]),
    "cs3darknet_s": (96, False, ["stages.1.blocks[1:]", "stages.2.blocks[1:]"]),
    "efficientformerv2_s0": (224, False, ["stages.2.blocks[1:]", "stages.3.blocks[1:]"]),
    "crossvit_tiny_240": (240, False, ["blocks.0.blocks.1[1:]", "blocks.1.blocks.1[1:]", "blocks.2.blocks.1[1:]"]),
}
"""The side of an image, whether the model is told so, and the lists of blocks."""

SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_2d_position_embeddings", "vocab_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_local_experts"), 4),
    **dict.fromkeys(("time_step_rank", "mamba_n_heads", "conv_kernel"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "expand", "type_vocab_size", "window_size"), 2),
    **dict.fromkeys(("bottleneck_num_hidden_layers", "num_frames", "eos_token_id"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "attention_window", "state_size", "mamba_d_state", "sliding_window", "patch_size"), 8),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "tubelet_size"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "image_size", "decoder_hidden_size"), 32),
    **{"max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 16, "mamba_d_head": 16, "feature_size": 32},
    **{"pad_token_id": 0, "num_labels": 5, "num_channels": 3, "attention_types": [[["global", "local"], 2]]},
}
"""Every configuration gets those of these sizes that it knows."""

SOUND = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2, "mask_time_prob": 0.0}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "squeeze_factor": 1}


def options_of(config):
    """The sizes that a configuration of transformers knows."""
    known = set(inspect.signature(config.__init__).parameters)
    for each in config.__mro__:
        known |= set(vars(each).get("__annotations__", ())) | set(inspect.signature(each.__init__).parameters)
    sizes = SIZES | (SOUND if "conv_stride" in known else {})
    known -= set(config.attribute_map) - {"vocab_size"}  # other names of the same
    return {name: size for name, size in sizes.items() if name in known}


def made_by_transformers(transformers, name):
    """A tiny model."""
    model = getattr(transformers, name)
    torch.manual_seed(0)
    return model(model.config_class(**options_of(model.config_class)))


def inputs_of(net):
    """What its forward takes."""
    draw = torch.Generator().manual_seed(4)
    if net.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)}
    if net.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 400, generator=draw)}
    if net.main_input_name == "input_features":
        return {"input_features": torch.randn(2, 16, 64, generator=draw)}
    tokens = torch.randint(3, 50, (2, 16), generator=draw)
    found = {"input_ids": tokens}
    if net.config.is_encoder_decoder:
        found["decoder_input_ids"] = tokens.flip(1)
    if "use_cache" in inspect.signature(net.forward).parameters:
        found["use_cache"] = False  # a cache stores keys in another layout
    return found

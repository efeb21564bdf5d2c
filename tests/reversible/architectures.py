"""Tiny models of the architectures of transformers and timm, with random weights.

One row each: a name, the class or timm's name of the model, its lists of blocks where ``recompute`` does not find them,
and what makes it tiny besides the sizes that all share.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")


class Row(NamedTuple):
    """One architecture.

    ``name``: as the README lists it. ``model``: a class of transformers, or what timm takes, with ``options`` of the
    configuration, or of ``create_model``. ``blocks``: as ``recompute`` takes them. ``inputs``: shapes of tensors that the
    forward takes besides, or in place of, tokens or an image; without the batch.
    """

    name: str
    model: str
    blocks: Any = None
    options: dict[str, Any] = {}
    inputs: dict[str, tuple[int, ...]] = {}

    @property
    def library(self) -> str:
        return "timm" if self.model.islower() else "transformers"


def row(name: str, model: str, blocks: Any = None, inputs: dict[str, tuple[int, ...]] | None = None, **options: Any) -> Row:
    return Row(name, model, blocks, options, inputs or {})


def plain(models: dict[str, str]) -> list[Row]:
    """Rows of a name and a class alone."""
    return [Row(name, model) for name, model in models.items()]


def stages(name: str, count: int = 4, start: int = 0) -> list[str]:
    return [name.format(stage) for stage in range(start, start + count)]


# fmt: off
# What the configurations of transformers have of these is set.
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "num_key_value_heads": 1,
    "head_dim": 16, "d_model": 32, "dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 64, "d_ff": 64, "d_kv": 16,
    "num_layers": 4, "num_decoder_layers": 4, "num_heads": 2, "encoder_layers": 3, "decoder_layers": 3,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_dim": 64,
    "word_embed_proj_dim": 32, "vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "image_size": 32, "patch_size": 8, "mlp_ratio": 2}

BOTH = ["model.encoder.layers", "model.decoder.layers"]
WAVE = {"input_values": (400,)}
MAMBA = {"state_size": 8, "n_groups": 1, "num_heads": 4, "head_dim": 16, "chunk_size": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
    "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1}
CONV = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2, "mask_time_prob": 0.0}
PYRAMID = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "patch_size": 4, "window_size": 4}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2}

HUGGING_FACE = {
    "text, decoder": [
        row("GPT-2", "GPT2LMHeadModel"),
        row("GPT-Neo", "GPTNeoForCausalLM", attention_types=[[["global", "local"], 2]], window_size=4),
        row("GPT-NeoX", "GPTNeoXForCausalLM"),
        row("GPT-J", "GPTJForCausalLM", rotary_dim=8),
        *plain({"Bloom": "BloomForCausalLM", "MPT": "MptForCausalLM", "OPT": "OPTForCausalLM", "Falcon": "FalconForCausalLM"}),
        row("Falcon-H1", "FalconH1ForCausalLM", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
            mamba_chunk_size=8),
        *plain({"Llama": "LlamaForCausalLM", "Mistral": "MistralForCausalLM", "Ministral": "MinistralForCausalLM"}),
        row("Mixtral", "MixtralForCausalLM", num_local_experts=4),
        *plain({"Qwen2": "Qwen2ForCausalLM", "Qwen3": "Qwen3ForCausalLM"}),
        row("Qwen3-MoE", "Qwen3MoeForCausalLM", **EXPERTS),
        row("Qwen3-Next", "Qwen3NextForCausalLM", **EXPERTS, shared_expert_intermediate_size=16, linear_num_value_heads=2,
            linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
        row("Qwen3.5", "Qwen3_5ForCausalLM", linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8),
        *plain({"Gemma": "GemmaForCausalLM", "Gemma 2": "Gemma2ForCausalLM", "Gemma 3": "Gemma3ForCausalLM",
            "VaultGemma": "VaultGemmaForCausalLM", "Phi": "PhiForCausalLM", "Phi-3": "Phi3ForCausalLM"}),
        *plain({"StableLM": "StableLmForCausalLM", "StarCoder2": "Starcoder2ForCausalLM", "Cohere": "CohereForCausalLM",
            "Cohere 2": "Cohere2ForCausalLM", "OLMo": "OlmoForCausalLM", "OLMo 2": "Olmo2ForCausalLM",
            "OLMo 3": "Olmo3ForCausalLM"}),
        row("OLMoE", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
        row("OLMo hybrid", "OlmoHybridForCausalLM", "model.layers"),
        row("SmolLM3", "SmolLM3ForCausalLM"),
        row("Granite", "GraniteForCausalLM"),
        row("GraniteMoE", "GraniteMoeForCausalLM", num_local_experts=4),
        *plain({"GLM": "GlmForCausalLM", "GLM-4": "Glm4ForCausalLM"}),
        row("GLM-4 MoE", "Glm4MoeForCausalLM", **EXPERTS, n_routed_experts=4, first_k_dense_replace=1),
        row("DeepSeek-V2", "DeepseekV2ForCausalLM", **LATENT),
        row("DeepSeek-V3", "DeepseekV3ForCausalLM", **LATENT),
        row("gpt-oss", "GptOssForCausalLM", num_local_experts=4),
        row("Llama 4", "Llama4ForCausalLM", num_local_experts=4, intermediate_size_mlp=64),
        *plain({"EXAONE 4": "Exaone4ForCausalLM", "ERNIE 4.5": "Ernie4_5ForCausalLM", "Helium": "HeliumForCausalLM",
            "Apertus": "ApertusForCausalLM", "Arcee": "ArceeForCausalLM", "Seed-OSS": "SeedOssForCausalLM",
            "Hunyuan": "HunYuanDenseV1ForCausalLM", "Aria": "AriaTextForCausalLM", "BitNet": "BitNetForCausalLM",
            "CWM": "CwmForCausalLM", "Jais 2": "Jais2ForCausalLM"}),
        row("DBRX", "DbrxForCausalLM", attn_config={"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
            ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}),
        row("DiffLlama", "DiffLlamaForCausalLM", num_attention_heads=4, num_key_value_heads=2),
        row("JetMoE", "JetMoeForCausalLM", kv_channels=16, num_key_value_heads=2, num_local_experts=4),
        row("MiniMax", "MiniMaxForCausalLM", num_local_experts=4),
        *plain({"nanochat": "NanoChatForCausalLM", "LFM2": "Lfm2ForCausalLM", "Doge": "DogeForCausalLM"}),
        row("Mamba", "MambaForCausalLM", state_size=8),
        row("Mamba-2", "Mamba2ForCausalLM", **MAMBA),
        row("Jamba", "JambaForCausalLM", num_experts=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
            use_mamba_kernels=False),
        row("Zamba", "ZambaForCausalLM", layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8, n_mamba_heads=2,
            use_mamba_kernels=False),
        row("Zamba2", "Zamba2ForCausalLM", layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8, n_mamba_heads=4,
            mamba_headdim=16, mamba_ngroups=1, chunk_size=8, use_mamba_kernels=False, adapter_rank=1),
        row("Bamba", "BambaForCausalLM", mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8,
            attn_layer_indices=[1, 3]),
        row("Nemotron-H", "NemotronHForCausalLM", mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
            chunk_size=8, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16),
        row("RWKV", "RwkvForCausalLM", context_length=16),
        *plain({"XGLM": "XGLMForCausalLM", "BioGPT": "BioGptForCausalLM", "CTRL": "CTRLLMHeadModel",
            "Persimmon": "PersimmonForCausalLM", "Nemotron": "NemotronForCausalLM"}),
        row("XLNet", "XLNetLMHeadModel", d_head=16, d_inner=64, n_layer=4),
    ],
    "text, encoder": [
        *plain({"BERT": "BertForMaskedLM", "BERT generation": "BertGenerationEncoder",
            "Megatron-BERT": "MegatronBertForMaskedLM", "RoBERTa": "RobertaForMaskedLM",
            "RoBERTa-PreLayerNorm": "RobertaPreLayerNormForMaskedLM", "XLM-R": "XLMRobertaForMaskedLM",
            "XLM-R XL": "XLMRobertaXLForMaskedLM"}),
        row("X-MOD", "XmodForMaskedLM", default_language="en_XX"),
        row("ELECTRA", "ElectraForPreTraining", embedding_size=32),
        row("DeBERTa", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        row("DeBERTa-v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        *plain({"DistilBERT": "DistilBertForMaskedLM", "ModernBERT": "ModernBertForMaskedLM",
            "ModernBERT decoder": "ModernBertDecoderForCausalLM", "EuroBERT": "EuroBertForMaskedLM",
            "NomicBERT": "NomicBertForMaskedLM", "MPNet": "MPNetForMaskedLM", "RoFormer": "RoFormerForMaskedLM"}),
        row("RemBERT", "RemBertForMaskedLM", input_embedding_size=32, output_embedding_size=32),
        row("ConvBERT", "ConvBertForMaskedLM", embedding_size=32),
        row("MobileBERT", "MobileBertForMaskedLM", embedding_size=32, intra_bottleneck_size=16, true_hidden_size=16),
        *plain({"I-BERT": "IBertForMaskedLM", "FNet": "FNetForMaskedLM"}),
        row("Longformer", "LongformerForMaskedLM", attention_window=4),
        row("BigBird", "BigBirdForMaskedLM", block_size=1, num_random_blocks=1),
        row("Nystromformer", "NystromformerForMaskedLM", num_landmarks=12, segment_means_seq_len=12),
        row("YOSO", "YosoForMaskedLM", use_expectation=True),
        *plain({"MRA": "MraForMaskedLM", "CANINE": "CanineModel", "Splinter": "SplinterModel", "DPR": "DPRQuestionEncoder",
            "TAPAS": "TapasModel", "FLAVA text": "FlavaTextModel"}),
        row("LUKE", "LukeModel", entity_vocab_size=10, entity_emb_size=16),
        row("LayoutLM", "LayoutLMForMaskedLM"),
        row("LiLT", "LiltModel", hidden_size=48),
        *plain({"MarkupLM": "MarkupLMModel", "VisualBERT": "VisualBertModel"}),
        row("ESM", "EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=4),
    ],
    "text, encoder and decoder": [
        *plain({"T5": "T5ForConditionalGeneration", "UMT5": "UMT5ForConditionalGeneration",
            "MT5": "MT5ForConditionalGeneration"}),
        row("LongT5", "LongT5ForConditionalGeneration", local_radius=4),
        row("Switch", "SwitchTransformersForConditionalGeneration", num_experts=2, num_sparse_encoder_layers=2,
            num_sparse_decoder_layers=2),
        row("BART", "BartForConditionalGeneration", BOTH),
        row("LED", "LEDForConditionalGeneration", ["led.encoder.layers", "led.decoder.layers"], attention_window=4),
        row("Pegasus", "PegasusForConditionalGeneration", BOTH),
        row("Pegasus-X", "PegasusXForConditionalGeneration", BOTH, block_size=4, num_global_tokens=2),
        row("M2M-100", "M2M100ForConditionalGeneration", BOTH),
        row("NLLB-MoE", "NllbMoeForConditionalGeneration", BOTH, num_experts=2, encoder_sparse_step=2, decoder_sparse_step=2),
        row("Marian", "MarianMTModel", BOTH, decoder_start_token_id=0),
        row("Blenderbot", "BlenderbotForConditionalGeneration", BOTH),
        row("ProphetNet", "ProphetNetForConditionalGeneration", ["prophetnet.encoder.layers", "prophetnet.decoder.layers"],
            use_cache=False),
        row("FSMT", "FSMTForConditionalGeneration", BOTH, src_vocab_size=50, tgt_vocab_size=50, langs=["en", "de"]),
    ],
    "images and video": [
        *plain({"ViT": "ViTForImageClassification", "DeiT": "DeiTForImageClassification", "BEiT": "BeitForImageClassification",
            "Data2Vec vision": "Data2VecVisionForImageClassification", "DINOv2": "Dinov2ForImageClassification",
            "DINOv2 with registers": "Dinov2WithRegistersForImageClassification", "DINOv3 ViT": "DINOv3ViTModel"}),
        row("DINOv3 ConvNeXt", "DINOv3ConvNextModel", stages("model.stages.{}.layers"), hidden_sizes=[8, 8, 16, 16],
            depths=[2, 2, 2, 2]),
        *plain({"I-JEPA": "IJepaForImageClassification", "ViT-MSN": "ViTMSNForImageClassification", "ViTDet": "VitDetModel",
            "Pixio": "PixioModel"}),
        row("Swin", "SwinForImageClassification", stages("swin.encoder.layers.{}.blocks", 2), **PYRAMID),
        row("Swin V2", "Swinv2ForImageClassification", stages("swinv2.encoder.layers.{}.blocks", 2), **PYRAMID),
        row("ConvNeXt", "ConvNextForImageClassification", stages("convnext.encoder.stages.{}.layers"),
            hidden_sizes=[8, 8, 16, 16], depths=[2, 2, 2, 2], image_size=64),
        row("PVT", "PvtForImageClassification", stages("pvt.encoder.block.{}"), hidden_sizes=[8, 16, 16, 32],
            num_attention_heads=[1, 2, 2, 2], depths=[2, 2, 2, 2], image_size=64),
        row("SegFormer", "SegformerForImageClassification", stages("segformer.stages.{}.blocks"), hidden_sizes=[8, 16, 16, 32],
            num_attention_heads=[1, 2, 2, 2]),
        row("PoolFormer", "PoolFormerForImageClassification", stages("poolformer.encoder.block.{}"),
            hidden_sizes=[8, 16, 16, 32], depths=[2, 2, 2, 2]),
        row("FocalNet", "FocalNetForImageClassification", stages("focalnet.encoder.stages.{}.layers"), embed_dim=8,
            depths=[2, 2, 2, 2], patch_size=4),
        row("Hiera", "HieraForImageClassification",
            ["hiera.encoder.stages.0.layers", *stages("hiera.encoder.stages.{}.layers[1:]", 3, start=1)], embed_dim=16,
            image_size=[64, 64], depths=[2, 3, 3, 3]),
        *plain({"ViT-MAE": "ViTMAEModel", "MLCD": "MLCDVisionModel", "GroupViT text": "GroupViTTextModel",
            "CLIP vision": "CLIPVisionModel", "CLIP text": "CLIPTextModel", "MetaCLIP 2 vision": "MetaClip2VisionModel",
            "ChineseCLIP vision": "ChineseCLIPVisionModel", "CLIPSeg vision": "CLIPSegVisionModel",
            "AltCLIP text": "AltCLIPTextModel", "SigLIP vision": "SiglipVisionModel", "SigLIP text": "SiglipTextModel",
            "AIMv2 vision": "Aimv2VisionModel", "BLIP vision": "BlipVisionModel", "BLIP-2 vision": "Blip2VisionModel",
            "InternVL vision": "InternVLVisionModel", "OWL-ViT vision": "OwlViTVisionModel"}),
        row("SAM vision", "SamVisionModel", global_attn_indexes=[1, 3], window_size=2, output_channels=16),
        row("Pixtral vision", "PixtralVisionModel"),
        row("ViLT", "ViltModel", inputs={"pixel_values": (3, 32, 32)}),
        row("VideoMAE", "VideoMAEModel", inputs={"pixel_values": (4, 3, 32, 32)}, num_frames=4, tubelet_size=2),
        row("TimeSformer", "TimesformerModel", inputs={"pixel_values": (2, 3, 32, 32)}, num_frames=2),
        row("ViViT", "VivitModel", inputs={"pixel_values": (4, 3, 32, 32)}, num_frames=4, tubelet_size=[2, 8, 8]),
        row("V-JEPA 2", "VJEPA2Model", inputs={"pixel_values_videos": (4, 3, 32, 32)}, crop_size=32, frames_per_clip=4,
            tubelet_size=2, pred_hidden_size=32, pred_num_hidden_layers=2, pred_num_attention_heads=2),
    ],
    "sound": [
        row("Wav2Vec2", "Wav2Vec2Model", inputs=WAVE, **CONV),
        row("Wav2Vec2-Conformer", "Wav2Vec2ConformerModel", inputs=WAVE, **CONV),
        row("Wav2Vec2-BERT", "Wav2Vec2BertModel", inputs={"input_features": (24, 16)}, feature_projection_input_dim=16),
        row("WavLM", "WavLMModel", inputs=WAVE, **CONV),
        row("Whisper", "WhisperForConditionalGeneration", BOTH, inputs={"input_features": (8, 24)}, num_mel_bins=8,
            max_source_positions=12, max_target_positions=64, decoder_start_token_id=1),
        row("AST", "ASTModel", inputs={"input_values": (40, 32)}, max_length=40, num_mel_bins=32, frequency_stride=8,
            time_stride=8),
        row("Speech2Text", "Speech2TextForConditionalGeneration", BOTH, inputs={"input_features": (24, 8)},
            input_feat_per_channel=8, conv_channels=16, use_cache=False),
        row("Moonshine", "MoonshineForConditionalGeneration", BOTH, inputs={"input_values": (4000,)}),
        row("Parakeet", "ParakeetEncoder", inputs={"input_features": (24, 16)}, num_mel_bins=16),
        row("MusicGen decoder", "MusicgenForCausalLM", num_codebooks=1),
    ],
    "time series": [
        row("PatchTST", "PatchTSTModel", inputs={"past_values": (32, 1)}),
        row("PatchTSMixer", "PatchTSMixerModel", inputs={"past_values": (32, 1)}),
        row("Decision Transformer", "DecisionTransformerGPT2Model"),
    ],
}

TIMM = {
    "images": [
        row("ViT", "vit_tiny_patch16_224", **VIT, drop_path_rate=0.2, proj_drop_rate=0.1),
        row("ViT with relative positions", "vit_relpos_small_patch16_224", **VIT),
        row("hybrid ViT", "vit_tiny_r_s16_p8_224", **VIT),
        row("parallel ViT", "vit_small_patch16_18x2_224", **VIT),
        row("DeiT", "deit_tiny_distilled_patch16_224", **VIT),
        row("DINOv2", "vit_small_patch14_reg4_dinov2", **VIT),
        row("SigLIP", "vit_base_patch16_siglip_224", **VIT),
        row("CLIP", "vit_base_patch32_clip_224", **VIT),
        row("SAM", "samvit_base_patch16", **VIT, window_size=2, global_attn_indexes=(1, 3)),
        row("NaFlexViT", "naflexvit_base_patch16_gap", embed_dim=32, depth=4, num_heads=2, patch_size=8),
        row("EVA", "eva_giant_patch14_224", **VIT),
        row("EVA-02", "eva02_tiny_patch14_224", **VIT),
        row("Perception encoder", "vit_pe_core_tiny_patch16_384", **VIT),
        row("BEiT", "beit_base_patch16_224", **VIT),
        row("CaiT", "cait_xxs24_224", "blocks", **VIT),
        row("ConViT", "convit_tiny", **VIT),
        row("CoaT", "coat_lite_tiny", stages("serial_blocks{}", 4, start=1), img_size=64),
        row("XCiT", "xcit_nano_12_p16_224", "blocks", **VIT),
        row("VOLO", "volo_d1_224", ["network.0", "network.2", "network.3", "network.4"], img_size=64),
        row("TNT", "tnt_s_patch16_224", "blocks", img_size=64, depth=4),
        row("PiT", "pit_ti_224", stages("transformers.{}.blocks", 3), img_size=64),
        row("LeViT", "levit_128s", stages("stages.{}.blocks", 3), img_size=64),
        row("Visformer", "visformer_tiny", stages("stage{}", 3, start=1), img_size=64),
        row("Twins SVT", "twins_svt_small", stages("blocks.{}"), img_size=64, depths=[1, 1, 4, 1]),
        row("PVT v2", "pvt_v2_b0", stages("stages.{}.blocks")),
        row("NesT", "nest_tiny", stages("levels.{}.transformer_encoder", 3), img_size=64),
        row("Swin", "swin_tiny_patch4_window7_224", stages("layers.{}.blocks"), img_size=64, window_size=4,
            depths=(2, 1, 2, 1)),
        row("Swin V2", "swinv2_tiny_window8_256", stages("layers.{}.blocks"), img_size=64, window_size=4,
            depths=(2, 1, 2, 1)),
        row("Hiera", "hiera_tiny_224", "blocks[4:10]", img_size=64),
        row("MaxViT", "maxvit_rmlp_pico_rw_256", "stages.2.blocks[1:]", img_size=64),
        row("CoAtNet", "coatnet_nano_rw_224", stages("stages.{}.blocks[1:]"), img_size=64),
        row("MViT v2", "mvitv2_tiny", "stages.2.blocks[1:]", img_size=64),
        row("DaViT", "davit_tiny", ["stages.0.blocks.0", "stages.1.blocks.0", "stages.3.blocks.0"]),
        row("FocalNet", "focalnet_tiny_srf", stages("layers.{}.blocks")),
        row("GC ViT", "gcvit_xxtiny", stages("stages.{}.blocks"), img_size=64),
        row("CAFormer", "caformer_s18", stages("stages.{}.blocks")),
        row("PoolFormer", "poolformer_s12", stages("stages.{}.blocks")),
        row("EdgeNeXt", "edgenext_xx_small", ["stages.0.blocks", "stages.1.blocks", "stages.2.blocks[:5]"]),
        row("EfficientFormer", "efficientformer_l1", stages("stages.{}.blocks", 3), depths=(1, 1, 2, 4)),
        row("EfficientViT", "efficientvit_b0", stages("stages.{}.blocks[1:]", 2, start=2)),
        row("FastViT", "fastvit_t8", stages("stages.{}.blocks")),
        row("TinyViT", "tiny_vit_5m_224", stages("stages.{}.blocks")),
        row("MobileViT", "mobilevit_xxs", ["stages.2.1.transformer", "stages.3.1.transformer", "stages.4.1.transformer"]),
        row("NextViT", "nextvit_small", ["stages.0.blocks[1:]", "stages.1.blocks[1:3]", "stages.2.blocks[1:4]"]),
        row("RepViT", "repvit_m0_9", stages("stages.{}.blocks")),
        row("SHViT", "shvit_s1", stages("stages.{}.blocks", 3)),
        row("SwiftFormer", "swiftformer_xs", ["stages.0.blocks[:2]", "stages.1.blocks[:2]"]),
        row("ViTamin", "vitamin_small_224", "blocks", img_size=64, depth=4),
        row("MLP-Mixer", "mixer_s16_224", img_size=64),
        row("gMLP", "gmlp_ti16_224", img_size=64),
        row("Sequencer", "sequencer2d_s", stages("stages.{}.blocks"), layers=[1, 1, 2, 1]),
        row("ConvMixer", "convmixer_768_32", "blocks"),
        row("ConvNeXt", "convnext_atto", stages("stages.{}.blocks"), depths=(2, 2, 4, 2), dims=(8, 16, 24, 32)),
        row("InceptionNeXt", "inception_next_atto", stages("stages.{}.blocks")),
        row("MambaOut", "mambaout_femto", stages("stages.{}.blocks")),
        row("FasterNet", "fasternet_t0", stages("stages.{}.blocks", 3, start=1)),
        row("StarNet", "starnet_s1", stages("stages.{}[1:]")),
        row("ResNet", "resnet34", stages("layer{}[1:]", 4, start=1)),
        row("NF-ResNet", "nf_resnet50", ["stages.2[1:]", "stages.3[1:]"]),
        row("CSPNet", "cspresnet50", stages("stages.{}.blocks")),
        row("EfficientNet", "efficientnet_b0", stages("blocks.{}[1:]", 3, start=3)),
        row("MobileNetV3", "mobilenetv3_large_100", ["blocks.2[1:]", "blocks.3[1:]", "blocks.5[1:]"]),
        row("MobileNetV4", "mobilenetv4_conv_small", ["blocks.2[1:]", "blocks.3[1:]"]),
        row("GhostNet", "ghostnet_050", "blocks.8[1:]"),
    ],
}
# fmt: on


def made(row: Row) -> tuple[nn.Module, dict[str, Any]]:
    """A model and what its forward takes. Its weights are random where they begin as zeros, so that every block has a
    gradient."""
    torch.manual_seed(0)
    model, batch = _of_timm(row) if row.library == "timm" else _of_transformers(row)
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model, batch


def tensors_in(out: Any) -> list[Tensor]:
    """What a model computes."""
    if isinstance(out, Tensor):
        return [out]
    return [part for part in tree_leaves(dict(out)) if isinstance(part, Tensor)]


def _of_timm(row: Row) -> tuple[nn.Module, dict[str, Any]]:
    model = timm.create_model(row.model, num_classes=5, **row.options)
    fixed = model.default_cfg["input_size"][-1] if model.default_cfg.get("fixed_input_size") else 64
    size = row.options.get("img_size", fixed)
    return model, {"x": torch.randn(2, 3, size, size)}


def _of_transformers(row: Row) -> tuple[nn.Module, dict[str, Any]]:
    model = getattr(transformers, row.model)
    known = model.config_class()
    shared = {name: type(getattr(known, name) or value)(value) for name, value in SIZES.items() if _is_number(known, name)}
    model = model(model.config_class(**shared | row.options))
    return model, _batch(model, row.inputs)


def _is_number(config: Any, name: str) -> bool:
    computed = isinstance(getattr(type(config), name, None), property)
    return not computed and hasattr(config, name) and not isinstance(getattr(config, name), list | tuple)


def _batch(model: nn.Module, inputs: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    name, config = model.main_input_name, model.config
    tokens = torch.randint(5, 50, (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0  # padding
    if name == "input_ids":
        batch = {"input_ids": tokens, "attention_mask": mask}
    else:
        size = getattr(config, "image_size", 64)
        batch = {name: torch.randn(2, 3, *([size] * 2 if isinstance(size, int) else size))}
    batch |= {name: torch.randn(2, *shape) for name, shape in inputs.items()}
    if "bbox" in inspect.signature(model.forward).parameters:
        batch["bbox"] = torch.tensor([1, 1, 2, 2]).expand(2, 12, 4)
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens
    return batch

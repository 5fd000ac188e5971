"""Every model type of transformers as a tiny model, with inputs. Its config is the default one, shrunk by rules."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BATCH, ROWS, WIDTH, HEADS, VOCABULARY, IMAGE = 2, 12, 64, 4, 160, 32
FIRST_TOKEN = 100  # below are the special tokens of all configs

# The first mapping that has a type gives its class. Masked models of types that are decoders too are their own case
_GENERATING = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
_OTHERS = ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES", "MODEL_FOR_PRETRAINING_MAPPING_NAMES")


def cases() -> list[tuple[str, str]]:
    """(model type, task): task is "" or, of types that have both, "masked"."""
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [
        (name, task)
        for name in CONFIG_MAPPING
        for task in (("", "masked") if name in masked and name in causal else ("",))
    ]


# What a name says about a number. The first that fits counts; None leaves it as it is
_RULES: tuple[tuple[str, Any], ...] = (
    (r"^(num_labels|type_vocab_size|chunk_size_feed_forward|num_channels|in_chans|num_frames|tubelet_size)$", None),
    (r"_token_id$|_token_index$|^(pad|bos|eos|sep|cls|unk)_index$", "token"),
    (r"vocab_size|num_embeddings$|^vocab$", VOCABULARY),
    (r"^num_kv_shared_layers$", 0),
    (r"^(num_feat_extract_layers|num_adapter_layers)$", None),
    (r"^mamba_(n|num)_heads$", 8),
    (r"(kv|key_value)_heads", "kv"),
    (
        r"(num|n)_.*heads$|^(num_heads|n_head|n_heads|heads|attention_heads|encoder_attention_heads|decoder_attention_heads)$",
        HEADS,
    ),
    (r"experts_per_tok|^moe_topk$|^top_k$|moe_k$|num_selected", 2),
    (r"n_groups?$|topk_group|num_expert_group", 1),
    (r"shared_expert.*size|moe_intermediate_size", WIDTH),
    (r"shared_experts", 1),
    (r"experts$", 4),
    (r"^first_k_dense_replace|moe_layer_start_index|num_dense_layers$", 1),
    (
        r"^(num_hidden_layers|num_layers|n_layer|n_layers|depth|encoder_layers|decoder_layers|num_encoder_layers|num_decoder_layers|num_blocks|layers|num_attention_layers)$",
        2,
    ),
    (r"(hidden_layers|_num_layers|num_.*layers|_layers)$", "layers"),
    (r"max_window_layers", 1),
    (
        r"^(head_dim|d_kv|kv_channels|attention_head_dim|attention_head_size|v_head_dim|qk_nope_head_dim|qk_head_dim|global_head_dim)$",
        WIDTH // HEADS,
    ),
    (r"index_head_dim|linear_.*head_dim|mamba_.*head_dim|mamba_d_head", 16),
    (r"qk_rope_head_dim", 8),
    (r"lora_rank", 16),
    (
        r"max_.*position|n_positions|^max_seq|max_length|context_length$|max_source|max_target|n_ctx|model_max_length",
        "positions",
    ),
    (r"sliding_window|local_attention|^window_size$|attention_window", "window"),
    (r"attention_chunk_size", 8),
    (r"image_size|img_size|input_image_size", IMAGE),
    (r"^patch_size$", "patch"),
    (
        r"(intermediate_size|ffn_dim|mlp_dim|d_ff|n_inner|ffn_size|ff_dim|linear_units|ffn_hidden_size|inner_dim)",
        2 * WIDTH,
    ),
    (r"mamba_d_state|state_size|^mamba_d_conv", 8),
    (r"n_mels|mel_bins", 16),
    (
        r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|dim$|_dim$|width|_size$|channels$|features$|dims?$)",
        "width",
    ),
)
_DROPPED = (
    "transformers_version",
    "_name_or_path",
    "architectures",
    "id2label",
    "label2id",
    "stage_names",
    "out_indices",
    "out_features",
    "_out_features",
    "_out_indices",
    "model_name",
    "qk_head_dim",
)


def _shrunk_number(name: str, value: int, config: dict[str, Any], few: bool) -> int:
    for pattern, rule in _RULES:
        if not re.search(pattern, name):
            continue
        if few and not (rule in ("token", "layers", VOCABULARY) or "layer" in pattern or pattern == "experts$"):
            return value
        if rule is None or value <= 0:
            return value
        if name == "head_dim" and config.get("qk_rope_head_dim") == value:
            return 8
        if rule == "token":
            return value if value < FIRST_TOKEN // 4 else FIRST_TOKEN // 4 + hash_of(name)
        if rule == "kv":
            heads = next(
                (
                    config[key]
                    for key in ("num_attention_heads", "n_head", "num_heads")
                    if isinstance(config.get(key), int)
                ),
                value,
            )
            return HEADS if value >= heads else min(value, HEADS // 2)
        if rule == "layers":
            return min(value, 2)
        if rule == "positions":
            return min(value, 128)
        if rule == "window":
            return min(value, 4) if value > 1 else value
        if rule == "patch":
            return 8 if value >= 8 else value
        if rule == "width":
            return min(value, WIDTH)
        return min(value, rule)
    return value


def hash_of(name: str) -> int:
    return sum(map(ord, name)) % (FIRST_TOKEN // 2)


# Lists with an entry for each layer
_OF_LAYERS = (
    r"layer_types|layers_block_type|layers_pattern|indexer_types|no_rope_layers|layer_rope_theta|attention_types"
    r"|per_layer|mlp_layer"
)


def _kept_layers(config: dict[str, Any]) -> list[int]:
    """One layer of each kind, and two at least."""
    kinds = next((list(map(str, config[key])) for key in ("layer_types", "layers_block_type") if config.get(key)), None)
    if kinds is None:
        return [0, 1]
    kept = sorted({kinds.index(kind) for kind in kinds})
    return kept if len(kept) > 1 else [0, 1][: len(kinds)]


def _shrunk_list(name: str, values: list[Any], kept: list[int], layers: int, few: bool) -> list[Any]:
    if values and (re.search(_OF_LAYERS, name) or len(values) == layers > 8):
        return [values[i % len(values)] for i in kept]
    if name in ("depths", "num_block_repeats", "layer_depths") and not few:
        return [1 for _ in values]
    if name == "image_size":
        return [v // 64 * 8 if v >= 64 else v for v in values]
    if name.startswith("mrope_section") and not few:
        return [4, 2, 2]
    if few or not values or not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return values
    if (
        re.search("hidden_sizes|dims|embed_dim|widths", name)
        and max(values) > WIDTH
        and all(v % 8 == 0 for v in values)
    ):
        return [v // (8 if max(values) > 256 else 4) if v % 32 == 0 else v for v in values]
    return values


def shrunk(config: dict[str, Any], few: bool = False) -> dict[str, Any]:
    kept = _kept_layers(config)
    layers = next(
        (config[key] for key in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(config.get(key), int)), 0
    )
    heads = next(
        (
            config[key]
            for key in ("num_heads", "num_attention_heads")
            if isinstance(config.get(key), list) and config[key]
        ),
        None,
    )
    result: dict[str, Any] = {}
    for name, value in config.items():
        if name in _DROPPED:
            continue
        if name == "per_layer_config" and value:
            value = {new: shrunk(value[key], few) for new, old in enumerate(kept) for key in value if int(key) == old}
        elif isinstance(value, dict):
            value = shrunk(value, few)
        elif isinstance(value, bool) or str(name).isdigit():
            pass
        elif value is None:
            if not few and name == "head_dim":
                value = WIDTH // HEADS
            elif not few and name == "num_key_value_heads":
                value = HEADS // 2
            else:
                continue
        elif isinstance(value, int):
            if name in ("num_hidden_layers", "num_layers", "n_layer"):
                value = min(value, len(kept))
            elif name == "hidden_size" and config.get("embed_dim_per_stage") and not few:
                value = config["embed_dim_per_stage"][0] // 8
            elif name == "embed_dim" and heads:
                value = value if few else 8 * heads[0]
            else:
                value = _shrunk_number(name, value, config, few)
        elif isinstance(value, (list, tuple)):
            value = _shrunk_list(name, list(value), kept, layers, few)
        elif isinstance(value, float) and re.search("dropout|drop_rate|drop_path|pdrop|layerdrop", name):
            value = 0.0
        result[name] = value
    return result


WITHOUT_DEFAULTS = ("nougat",)
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 64],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_BY_RESNET: dict[str, Any] = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET}
_FOUR_STAGES: dict[str, Any] = {"backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}}
_SERIES: dict[str, Any] = {"prediction_length": 4, "context_length": 8}
_WINDOWS: dict[str, Any] = {"window_size": 32, "fullatt_block_indexes": [1]}
_ROTARY: dict[str, Any] = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
    }
}
OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer"), _BY_RESNET),
    **dict.fromkeys(("depth_anything", "prompt_depth_anything", "tipsv2_dpt", "zoedepth", "chmv2"), _FOUR_STAGES),
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _SERIES),
    "xmod": {"default_language": "en_XX"},
    "blt": {
        part: {"hidden_size": 64, "hidden_size_global": 64, "vocab_size": 260, "encoder_hash_byte_group_vocab": 50}
        for part in ("patcher_config", "encoder_config", "decoder_config", "global_config")
    }
    | {"encoder_hash_byte_group_vocab": 50},
    **dict.fromkeys(("qwen2_5_vl_vision", "exaone4_5_vision", "qwen2_5_omni_vision_encoder"), _WINDOWS),
    **dict.fromkeys(("cohere_compass_text", "beam"), _ROTARY),
    "cohere_compass": {"text_config": _ROTARY},
    "bamba": {"num_hidden_layers": 2, "layer_types": None, "layers_block_type": None, "attn_layer_indices": [1]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "emu3": {"vocabulary_map": {"<image>": 8}},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "xlstm": {"qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "chameleon": {"vocabulary_map": {"<image>": 8}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 4,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dia": {"delay_pattern": [0, 1], "decoder_config": {"num_channels": 2}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "esm": {"vocab_size": 160, "pad_token_id": 1, "mask_token_id": 32},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": 64,
        "num_kv_shared_layers": 0,
    },
    "hrm_text": {"prefix_lm": True, "num_layers_per_stack": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "moshi_depth": {"num_codebooks": 12},
    "nougat": {},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 8], "attn_layers": ["local", "lsh"]},
    "step3p5": {"sliding_window": 4},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "xlnet": {"d_head": 16},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "layer_types": ["mamba", "hybrid"] * 2,
    },
}


# Types that are not tried, and why
_NOT_MADE: dict[str, str] = {
    "needs timm": (
        "edgetam edgetam_video edgetam_vision_model fast_vlm gemma3n gemma3n_vision pe_audio_video "
        "pe_audio_video_encoder pe_video pe_video_encoder perception_lm timm_backbone timm_wrapper"
    ),
    "needs torchaudio": ("higgs_audio_v2_tokenizer"),
    "needs detectron2": ("layoutlmv2"),
    "has no forward": ("chameleon_vqgan emu3_vqgan glm_image_vqmodel qwen2_5_omni qwen2_5_omni_token2wav"),
    "needs the state of a video session": ("sam2_video sam3_tracker_video sam3_video"),
    "needs the states of another model": (
        "gemma4_assistant gemma4_unified_assistant muse_glimmer_assistant rag qwen3_omni_moe_talker_text "
        "qwen3_omni_moe_talker_code_predictor qwen2_5_omni_talker moshi_depth"
    ),
    "a part whose masks or inputs the whole model makes": (
        "blt_global_transformer blt_local_decoder blt_local_encoder idefics2_perceiver inkling_audio "
        "inkling_vision minicpm_ocr_vision minicpmv4_6_vision minicpmv4_7_vision mllama_vision_model "
        "molmo2_adapter molmo2_vision paddleocr_vl_vision qwen2_5_omni_dit phi4_multimodal_audio "
        "fun_asr_nano_encoder audioflamingo3_encoder qwen3_asr_encoder kosmos_2_5_vision_model "
        "voxtral_realtime_text"
    ),
    "its default config is not complete": (
        "t5gemma2_decoder t5gemma2_encoder t5gemma2_text diffusion_gemma diffusion_gemma_text "
        "granite4_vision moonshine_streaming qwen3_omni_moe qwen4_exp qwen4_exp_text shieldgemma2 "
        "upernet"
    ),
    "needs images, audio or states beside its tokens": (
        "blip-2 idefics instructblip instructblipvideo kosmos-2 kosmos-2.5 pi0 voxtral_realtime pe_audio "
        "pe_audio_encoder"
    ),
    "cannot be shrunk by rules": (
        "csm d_fine dac deimv2 depth_pro dia efficientnet esmfold2 janus_vqgan kyutai_speech_to_text "
        "lw_detr mimi_decoder molmo2 muse_spark muse_spark_audio nemotron3_5_asr nemotron_asr_streaming "
        "nemotron_asr_streaming_encoder neucodec pocket_tts_audio_tokenizer_decoder pp_doclayout_v3 "
        "pp_doclayout_v4 pp_ocrv5_mobile_det pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det "
        "qwen2_5_omni_bigvgan rt_detr rt_detr_v2 sam2 sam3_tracker uvdoc "
        "vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder vibevoice_asr xcodec "
        "xcodec2 zamba2"
    ),
    "its output hardly depends on its attention": (
        "mimi mimi_encoder pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_encoder"
    ),
}
NOT_MADE = {name: reason for reason, names in _NOT_MADE.items() for name in names.split()}

# Their default sections of the rotary embedding are for larger heads
_SECTIONS = {
    (4, 2, 2): (
        "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text colqwen2 qwen2_5_omni_text qwen2_5_omni "
        "qwen2_5_omni_thinker paddleocr_vl paddleocr_vl_text glm_image glm_image_text glm4v glm4v_text glm46v glm_ocr "
        "glm_ocr_text glmga hunyuan_vl hunyuan_vl_text"
    ),
    (2, 1, 1): "glm4v_moe glm4v_moe_text",
    (2, 2, 4): "ernie4_5_vl_moe ernie4_5_vl_moe_text",
}
MROPE = {name: list(section) for section, names in _SECTIONS.items() for name in names.split()}


def _with_mrope(values: dict[str, Any], section: list[int]) -> dict[str, Any]:
    result = {key: _with_mrope(value, section) if isinstance(value, dict) else value for key, value in values.items()}
    if isinstance(result.get("rope_parameters"), dict):
        result["rope_parameters"] = {**result["rope_parameters"], "mrope_section": section}
    return result


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
        if value is None:
            del result[name]
    return result


def tiny_config(name: str, task: str = "", few: bool = False) -> Any:
    kind = CONFIG_MAPPING[name]
    values = merged(shrunk({} if name in WITHOUT_DEFAULTS else kind().to_dict(), few), OVERRIDES.get(name, {}))
    if name in MROPE and not few:
        values = _with_mrope(values, MROPE[name])
    if task == "" and "is_decoder" in values and name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        values["is_decoder"] = True
    return kind(**values)


def model_class(name: str, task: str = "") -> Any:
    kind = CONFIG_MAPPING[name]
    mappings = _OTHERS[:1] if task == "masked" else _GENERATING + _OTHERS
    others = []
    for mapping in mappings:
        found = getattr(modeling_auto, mapping, {}).get(name)
        if found is not None:
            found = found if isinstance(found, str) else found[0]
            model = getattr(importlib.import_module("transformers"), found, None)
            if model is not None and model.config_class in (None, kind):
                return model
            others.append(model)
    try:
        module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:
        if not others or others[0] is None:
            raise LookupError("no model of its own") from None
        return others[0]
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.config_class is kind
    ]
    found = [value for value in found if "forward" in vars(value)] or [
        v for v in found if not v.__name__.endswith("PreTrainedModel")
    ]
    found += [other for other in others if other is not None]
    if not found:
        raise LookupError("no model of its own")
    return found[-1] if not others else found[0]


def tiny_model(name: str, task: str = "", few: bool = False, **options: Any) -> Any:
    """Makes a model with weights that make attention matter: transformers' initial ones are too small for that."""
    kind = model_class(name, task)
    torch.manual_seed(0)
    config = tiny_config(name, task, few)
    if few:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in kind._from_config(copy.deepcopy(config)).parameters())
        if size > 6e7:
            raise ValueError(f"{size / 1e6:.0f} million weights")
    model = kind._from_config(config, dtype=torch.float32, **options)
    sharpen(model)
    return model.eval()


def sharpen(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if not weight.is_floating_point() or weight.numel() == 0:
                continue
            if isinstance(weight, torch.nn.Parameter) and weight.dim() > 1:
                fan_in = weight[0].numel() if weight.dim() != 3 else weight.shape[-1]
                weight.normal_(
                    0.0, (2.0 if weight.dim() == 2 and "embed" not in name else 1.0) / fan_in**0.5, generator=generator
                )
            elif isinstance(weight, torch.nn.Parameter) and weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
            elif not weight.isfinite().all():
                weight.zero_()


def inputs_of(model: Any, rows: int = ROWS) -> Iterator[dict[str, Any]]:
    """Yields what may be the inputs of this model, the likeliest first."""
    config = model.config
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    parameters = inspect.signature(model.forward).parameters
    choices: dict[str, list[Any]] = {}
    for name, parameter in parameters.items():
        found = list(_choices(name, model, config, text, rows, parameter.default is inspect.Parameter.empty))
        if found:
            choices[name] = found
    for combination in itertools.islice(itertools.product(*choices.values()), 24):
        yield {key: value for key, value in zip(choices, combination, strict=True) if value is not None}


def _of(config: Any, *names: str) -> Any:
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]
    for name in names:
        for part in parts:
            value = getattr(part, name, None)
            if isinstance(value, (list, tuple)) and value:
                value = value[-1]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _choices(name: str, model: Any, config: Any, text: Any, rows: int, needed: bool) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    parameters = inspect.signature(model.forward).parameters
    is_main = needed or model.main_input_name == name
    has_text = "input_ids" in parameters
    size = _of(config, "image_size", "img_size", "input_image_size") or IMAGE
    if config.model_type in ("detr", "conditional_detr", "segformer", "efficientloftr"):
        size = 128  # or there is one key
    channels = _of(config, "num_channels", "in_chans", "in_channels") or 3
    frames = _of(config, "num_frames", "frames_per_clip") or 4
    width = _of(config, "hidden_size", "d_model", "n_embd") or WIDTH
    patch = _of(config, "patch_size") or 8
    sides = getattr(config, "image_size", None) or getattr(getattr(config, "backbone_config", None), "image_size", None)
    height, breadth = (sides if isinstance(sides, (list, tuple)) else (size, size))[:2]
    if name in ("input_ids", "decoder_input_ids"):
        high = _of(text, "vocab_size") or VOCABULARY
        low = FIRST_TOKEN if high > FIRST_TOKEN else 3 if high > 8 else 0
        yield torch.randint(low, high, (BATCH, rows), generator=generator)
        if _of(config, "num_codebooks"):
            yield torch.randint(low, high, (BATCH * _of(config, "num_codebooks"), rows), generator=generator)
            yield torch.randint(low, high, (BATCH, rows, _of(config, "num_codebooks")), generator=generator)
            yield torch.randint(low, high, (BATCH, _of(config, "num_codebooks"), rows), generator=generator)
    elif "grid_thw" in parameters and name in ("hidden_states", "pixel_values"):
        flat = channels * patch**2
        yield normal(32, flat * (_of(config, "temporal_patch_size") or 1))
        yield normal(32, flat)
        yield normal(32, flat * 2)
        yield normal(32, channels, patch, patch)
        yield normal(1, 32, flat)
        yield normal(1, 32, channels, patch, patch)
    elif name == "grid_thw" and needed:
        yield torch.tensor([[1, 4, 4], [1, 4, 4]])
    elif name == "use_cache":
        yield None
        yield False
    elif name in ("states", "actions", "rewards", "returns_to_go") and "timesteps" in parameters:
        yield normal(
            BATCH, rows, {"states": _of(config, "state_dim"), "actions": _of(config, "act_dim")}.get(name) or 1
        )
    elif name == "timesteps":
        yield torch.arange(rows).expand(BATCH, rows)
    elif name == "attention_mask" and "timesteps" in parameters:
        yield torch.ones(BATCH, rows, dtype=torch.long)
    elif name == "spatial_shapes":
        yield torch.tensor([[2, 2], [2, 2]])
    elif name == "pixel_attention_mask" and "spatial_shapes" in parameters:
        yield torch.ones(BATCH, 4, dtype=torch.long)
    elif name in ("pixel_position_ids", "image_position_ids") and needed:
        yield (
            torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1)
            .reshape(1, 16, 2)
            .expand(BATCH, 16, 2)
        )
    elif name == "encoder_hidden_states" and "query_embeds" in parameters:
        yield normal(BATCH, rows, _of(config, "encoder_hidden_size") or width)
    elif name == "aspect_ratio_ids" and needed:
        yield torch.ones(BATCH, 1, dtype=torch.long)
    elif name == "aspect_ratio_mask" and needed:
        yield torch.ones(BATCH, 1, 4, dtype=torch.long)
    elif name == "qformer_input_ids" and needed:
        yield torch.randint(FIRST_TOKEN, VOCABULARY, (BATCH, rows), generator=generator)
    elif name == "past_values_padding" and needed:
        yield torch.zeros(BATCH, _of(config, "context_length") or 32)
    elif name == "freq" and needed:
        yield torch.zeros(BATCH, 1, dtype=torch.long)
    elif name == "mask" and needed and "hidden_states" in parameters:
        yield torch.ones(BATCH, rows, dtype=torch.bool)
    elif name == "merge_sizes" and needed:
        yield torch.tensor([2, 2])
    elif name in ("pixel_values", "image"):
        if has_text and not needed:
            yield None
        if "aspect_ratio_ids" in parameters:
            yield normal(BATCH, 1, 4, channels, size, size)
        if "pixel_position_ids" in parameters:
            yield normal(BATCH, 16, channels * patch**2)
        if "spatial_shapes" in parameters:
            yield normal(BATCH, 4, channels * patch**2)
        yield normal(BATCH, channels, height, breadth)
        yield normal(BATCH, frames, channels, size, size)
        yield normal(BATCH * frames, channels, size, size)
        yield normal(BATCH, 2, channels, size, size)
        for other in (64, 128, 256):
            yield normal(BATCH, channels, other, other)
    elif name == "pixel_values_videos" and is_main:
        yield normal(BATCH, frames, channels, size, size)
    elif name == "input_values":
        if not is_main and has_text:
            yield None
        yield normal(BATCH, 8000)
        yield normal(BATCH, 1, 8000)
        yield normal(BATCH, _of(config, "max_length") or 64, _of(config, "num_mel_bins") or 16)
    elif name in ("input_features", "audio_mel") and (is_main or has_text):
        mels = (
            _of(
                config,
                "num_mel_bins",
                "feature_size",
                "n_mels",
                "input_dim",
                "input_feat_per_channel",
                "feature_projection_input_dim",
                "input_feat_size",
            )
            or 16
        )
        length = 2 * (_of(config, "max_source_positions") or 32)
        if not is_main and has_text:
            yield None
        yield normal(BATCH, mels, length)
        yield normal(BATCH, length, mels)
        yield normal(BATCH, 1, length, mels)
        yield normal(mels, length)
        yield normal(BATCH, 1, size, size)
    elif name in ("hidden_states", "inputs_embeds", "query_embeds", "noise_embeds") and needed:
        yield normal(BATCH, rows, width)
        yield normal(BATCH, channels, size, size)
        yield normal(BATCH, _of(config, "channels") or 1, 4000)
    elif name in ("feature_lens", "aftercnn_lens") and model.main_input_name == "input_features":
        yield torch.tensor([2 * (_of(config, "max_source_positions") or 32)])
    elif name == "audio_mel_mask" or (name == "input_features_mask" and is_main):
        yield torch.ones(BATCH, 2 * (_of(config, "max_source_positions") or 32), dtype=torch.bool)
    elif name == "flattened_patches":
        yield torch.cat(
            [
                torch.randint(1, 9, (BATCH, rows, 2), generator=generator).float(),
                normal(BATCH, rows, (_of(config, "patch_size") or 16) ** 2 * 3),
            ],
            -1,
        )
    elif name == "bbox" and has_text:
        yield torch.randint(0, 60, (BATCH, rows, 4), generator=generator).sort(-1).values
        yield torch.rand(BATCH, rows, 4, generator=generator).sort(-1).values
        yield torch.rand(BATCH, rows, 8, generator=generator)
    elif name in ("past_values", "spectrogram", "mel_spectrogram") and is_main:
        yield normal(
            BATCH,
            _of(config, "context_length") or 32,
            _of(config, "num_input_channels", "model_in_dim", "num_mel_bins", "mel_dim") or 1,
        )
        yield normal(BATCH, _of(config, "context_length") or 32)


def tensors_of(output: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of numbers in a model's output but caches."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield prefix, output
    elif hasattr(output, "items"):
        for key, value in output.items():
            if key not in (
                "past_key_values",
                "attentions",
                "cache_params",
                "encoder_attentions",
                "decoder_attentions",
                "cross_attentions",
            ):
                yield from tensors_of(value, f"{prefix}.{key}")
    elif isinstance(output, (list, tuple)):
        for index, value in enumerate(output):
            yield from tensors_of(value, f"{prefix}.{index}")

"""The one module that builds models with the transformers library."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError as HubError
from torch import Tensor, nn

from harness.config.model import HFModelInfo, ModelConfig
from harness.config.model_files import require_library
from harness.layout.layer_spec import MATRIX_DIMS
from harness.models.decoder import repeats_grouped_heads
from harness.models.grouped import GroupedProduct, count_tokens
from harness.util.text import UserError, one_line

ATTENTION_IMPLEMENTATIONS = {"flash": "sdpa", "eager": "eager"}  # model.attention to transformers' attn_implementation


# Text parts of models that also see, without a causal model in the library: the models that they are without images.
TEXT_PARTS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def import_transformers() -> Any:
    """Return the transformers library; raise UserError if it is not installed."""
    require_library()
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


def instantiate(config: Any, attention: str, path: object, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of the library whose call takes token ids and returns logits.

    Raise UserError if it has no such attention.
    """
    from transformers.initialization import no_init_weights

    transformers = import_transformers()
    use_own_kernels()
    with no_init_weights():
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
        except ValueError as error:
            if attention not in str(error) and "attention implementation" not in str(error):
                raise
            other = next(ours for ours, theirs in ATTENTION_IMPLEMENTATIONS.items() if theirs != attention)
            reason = f"{config.model_type} has no {attention} attention in transformers"
            raise UserError(f"model.path={path}: {reason}, choose model.attention={other}") from None
    model.tie_weights()
    model.__class__ = causal_lm_adapter(type(model))  # type: ignore[arg-type]
    return model  # type: ignore[no-any-return]


def build_hf_model(model: ModelConfig, info: HFModelInfo) -> nn.Module:
    """Return the model that a run trains: parameters on the meta device, buffers on the host with their values."""
    from accelerate import init_empty_weights

    config = load_hf_config(info.config, model.path)
    with init_empty_weights(include_buffers=False):
        built = instantiate(config, ATTENTION_IMPLEMENTATIONS[model.attention], model.path)
    built.tie_weights()  # type: ignore[operator]  # init_empty_weights replaced each parameter and undid the tying
    return built


@functools.cache
def use_own_kernels() -> None:
    """Let the library call torch's kernels as the decoder does, for as long as this process lives.

    Its own rule of attention (transformers/integrations/sdpa_attention.py) hands grouped keys to torch unless there is
    a mask, in fp32 on CUDA too, where torch then materializes the scores. Keys that the rule refuses are repeated by
    the library. Its experts (transformers/integrations/moe.py) multiply by a view of their weights, which autograd
    would keep where DeepSpeed's stage 3 has freed the weights themselves. Its masks (transformers/masking_utils.py) are
    of packed sequences wherever positions cannot be read, as those of fake tensors, and no sequence here is packed.
    """
    from transformers import masking_utils
    from transformers.integrations import moe, sdpa_attention

    rule_of_library, product_of_library = sdpa_attention.use_gqa_in_sdpa, moe._grouped_linear

    def grouped_linear(
        rows: Tensor, weight: Tensor, offs: Tensor, bias: Any = None, is_transposed: bool = False
    ) -> Any:
        if is_transposed or bias is not None:
            return product_of_library(rows, weight, offs, bias, is_transposed)
        return GroupedProduct.apply(rows.to(weight.dtype), weight, offs)  # type: ignore[no-untyped-call]

    def use_gqa_in_sdpa(attention_mask: Tensor | None, key: Tensor, *others: Tensor) -> bool:
        return not repeats_grouped_heads(key) and rule_of_library(attention_mask, key, *others)

    masking_utils.find_packed_sequence_indices = lambda *_: None  # type: ignore[assignment]
    sdpa_attention.use_gqa_in_sdpa, moe._grouped_linear = use_gqa_in_sdpa, grouped_linear  # type: ignore[assignment]


@functools.cache
def causal_lm_adapter(base: type) -> type:
    """Return a subclass of the library's class with the interface of harness.models.decoder.Decoder."""

    class CausalLM(base):  # type: ignore[misc]
        """A causal language model that engines handle as a Decoder."""

        def forward(self, tokens: Tensor) -> Tensor:
            """Return logits (batch, seq, vocab) of token ids (batch, seq)."""
            logits: Tensor = super().forward(input_ids=tokens, use_cache=False).logits
            return logits

        def layers_by_index(self) -> dict[int, nn.Module]:
            """Return the decoder layers by their index."""
            return dict(enumerate(decoder_layers(self)[1]))

        def listen_to_routers(self, listener: Callable[[int, Tensor], None]) -> None:
            """Call a listener in each forward of a layer with its index and the number of tokens of each expert."""
            for index, layer in self.layers_by_index().items():
                for experts in filter(has_stacked_weights, layer.modules()):
                    count = partial(announce_tokens, partial(listener, index))
                    experts.register_forward_pre_hook(count)

        def embedding_and_head_groups(self) -> list[list[nn.Module]]:
            """Return embedding and head as two lists; tied weights are left to the model's root."""
            if self.config.tie_word_embeddings:
                return [[]]
            return [[self.get_input_embeddings()], [self.get_output_embeddings()]]

    CausalLM.__name__ = base.__name__
    return CausalLM


def has_stacked_weights(module: nn.Module) -> bool:
    """Return whether the module itself has the weights of several experts, stacked."""
    return any(parameter is not None and parameter.dim() > MATRIX_DIMS for parameter in module._parameters.values())


def announce_tokens(listener: Callable[[Tensor], None], experts: Any, args: tuple[Tensor, ...]) -> None:
    """Call a listener with the number of tokens of each expert; `args` are hidden states, indices and weights."""
    listener(count_tokens(args[1], experts.num_experts))


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the path of the list of decoder layers, the ModuleList with most parameters, and the list."""
    lists = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return max(lists, key=lambda entry: sum(parameter.numel() for parameter in entry[1].parameters()))


def load_hf_config(values: dict[str, Any], path: object) -> Any:
    """Return the library's own configuration object, that of the text part of a model of several kinds of input.

    Raise UserError if it is not a causal language model's.
    """
    transformers = import_transformers()
    try:
        # Its files have infinity as an object, which it decodes on reading.
        config = transformers.AutoConfig.for_model(**transformers.PretrainedConfig._decode_special_floats(values))
    except (ValueError, TypeError, KeyError, AttributeError, HubError) as error:
        version = f"transformers {transformers.__version__}"
        raise UserError(f"model.path={path} is not a configuration that {version} accepts: {one_line(error)}") from None
    text = getattr(config, "text_config", None)
    if text is not None:
        of_text = getattr(text, "tie_word_embeddings", False)
        text.tie_word_embeddings = values.get("tie_word_embeddings", of_text)
        config = text
    if config.model_type in TEXT_PARTS:  # positions along time, height and width are one where all tokens are text
        same = config.to_dict() | {"model_type": TEXT_PARTS[config.model_type]}
        same["rope_parameters"].pop("mrope_section", None)
        config = transformers.AutoConfig.for_model(**same)
    causal, masked = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
    is_encoder = type(config) in masked._model_mapping and not getattr(config, "is_decoder", True)
    if type(config) not in causal._model_mapping or is_encoder or getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"model.path={path} with model_type={config.model_type} is not a causal language model: choose one"
        )
    return config

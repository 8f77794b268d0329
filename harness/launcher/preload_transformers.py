"""The imports of the forkserver before it forks CPU ranks that train a model of the transformers library."""

from harness.launcher.preload import load_library

load_library(
    (
        "harness.models.hf_library",
        "transformers.integrations.moe",
        "transformers.integrations.sdpa_attention",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
    )
)

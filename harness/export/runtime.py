"""The only module of the harness that exported scripts import; its names are stable.

A script that `harness export` wrote trains the run's own model on the run's own data until its user replaces both. For
that it needs these seven names, and no others; each is documented where it is defined:

- read_run_spec(run_folder): the run's configuration, layout and corpus.
- Batches(corpus, config, layout, rank, device): called with a step, the rank's micro-batches of that step.
- build_model(model_config, stage=None): the model, or one pipeline stage of it, on the meta device.
- stages_of_rank(model_config, layout, rank): the pipeline stages of a rank.
- materialize(model, model_config, seed, device, dtype, storage_device=None): fills the model with its initial values.
- initial_value(name, shape, model_config, seed, device): the initial value of one whole parameter, in fp32.
- loss_function(logits, targets): the mean cross-entropy over the tokens.

Scripts that were exported before continue to work when other modules of the harness change.
"""

from harness.layout.partition import stages_of_rank
from harness.models.build import build_model
from harness.models.decoder import loss_function
from harness.models.init_weights import initial_value, materialize
from harness.records.run_folder import read_run_spec
from harness.worker.batches import Batches

__all__ = [
    "Batches",
    "build_model",
    "initial_value",
    "loss_function",
    "materialize",
    "read_run_spec",
    "stages_of_rank",
]

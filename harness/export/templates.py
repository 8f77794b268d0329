"""Fixed pieces of exported scripts: imports, the part that is the user's to replace, and the beginning and end.

Words in capitals and braces are replaced when a script is assembled.
"""

from harness.export.recorded_run import RecordedRun
from harness.export.snippets import dedented

RULER = "# " + "-" * 117

IMPORTS = ["import os", "from pathlib import Path", "import torch", "import torch.distributed as dist"]

# The names that build, batches and the rest below use; `names` are those that not every script needs.
RUNTIME_IMPORTS = """from harness.export.runtime import {names}

RUN = read_run_spec({run_folder})"""

BUILD = dedented('''
    def build():
        """Return the model without memory for its parameters, which they get once they are sharded."""
        return build_model(RUN.config.model)
    ''')

BUILD_STAGES = dedented('''
    def build():
        """Return this rank's pipeline stages without memory; inner ones take and return hidden states."""
        stages = stages_of_rank(RUN.config.model, RUN.layout, dist.get_rank())
        return [build_model(RUN.config.model, stage) for stage in stages]
    ''')

LAYERS = dedented('''
    def layers(model):
        """Return the decoder layers in their order."""
        return list(model.layers_by_index().values())
    ''')

ENDS = dedented('''
    def ends(model):
        """Return what is gathered as a group of its own besides the layers: embeddings, and final norm with head.

        If their weights are tied, they stay with the root module.
        """
        return model.embedding_and_head_groups() if len(model.embedding_and_head_groups()) > 1 else []
    ''')

FILL = dedented('''
    def fill(model, device):
        """Give the parameters memory and initial values, of a sharded one this rank's part; load a checkpoint here."""
        materialize(model, RUN.config.model, RUN.config.train.seed, device, DTYPE)
    ''')

BATCHES = dedented('''
    def batches(device):
        """Return a function of the step: this rank's micro-batches (inputs, targets), token ids (batch, sequence)."""
        return Batches(RUN.corpus, RUN.config, RUN.layout, dist.get_rank(), device)
    ''')

MASTERS_IMPORTS = ("from deepspeed.utils import safe_set_full_fp32_param",)

MASTERS = dedented("""
    for name, parameter in engine.module.named_parameters():  # DeepSpeed made its fp32 masters of rounded weights
        shape = getattr(parameter, "ds_shape", parameter.shape)
        value = initial_value(name, shape, RUN.config.model, RUN.config.train.seed, device)
        safe_set_full_fp32_param(parameter, value)
    """)

END = dedented("""
    if __name__ == "__main__":
        main()
        backend = dist.get_backend()
        dist.destroy_process_group()  # after the model is gone: a DistributedDataParallel that outlives it can hang
        if backend == "gloo":  # its threads may still release tensors, which aborts an interpreter that shuts down
            os._exit(0)
    """)

START = dedented("""
    on_gpu = {on_gpu}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    """)


def start(run: RecordedRun) -> str:
    """Return the lines that join the process group on the run's kind of device.

    On another kind the initial weights would differ, as its random numbers do.
    """
    test = "torch.cuda.is_available()"
    return START.format(
        on_gpu=test if run.device == "cuda" else f"False  # as in the run; write {test} to use GPUs where there are any"
    )

"""The parts of a step's time and of a peak's bytes, by the names that they have in runs.csv. Imports no torch.

Formulas, simulations and measurements divide a step and a peak in the same way, and pages name parts by these columns.
"""

# The columns whose seconds add up to a step, in the order in which they are drawn.
STEP_PARTS = (
    *("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"),
    *("exposed_communication_seconds", "exposed_copy_seconds", "idle_seconds", "other_seconds"),
)

# The columns at_peak_*_bytes by what the formulas sum at a peak. Gathered parameters are part of the buffers. `loss`
# and `workspace` are parts of plans alone: runs count both as temporary.
PEAK_PARTS = {
    "parameters": "at_peak_parameter_bytes",
    "gradients": "at_peak_gradient_bytes",
    "optimizer": "at_peak_optimizer_bytes",
    "activations": "at_peak_activation_bytes",
    "loss": "at_peak_loss_bytes",
    "buffers": "at_peak_communication_bytes",
    "temporaries": "at_peak_temporary_bytes",
    "workspaces": "at_peak_workspace_bytes",
}

# The parts that add up to a measured peak, in the columns at_peak_<part>_bytes, with their titles.
PEAK_TITLES = {
    "parameter": "parameters",
    "optimizer": "optimizer state",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "activation": "activations",
    "communication": "communication buffers",
    "temporary": "temporary tensors",
    "rounding": "allocator rounding",
    "unmatched": "unattributed",
}

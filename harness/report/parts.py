"""What a peak and a step divide into, and how each part is called: at_peak_<part>_bytes, and columns of seconds."""

PEAK_PARTS = {
    "parameter": "parameters",
    "optimizer": "optimizer",
    "gradient": "gradients",
    "gathered": "gathered parameters",
    "activation": "activations",
    "communication": "communication buffers",
    "temporary": "temporaries",
    "rounding": "rounding",
    "unmatched": "unmatched",
}
STEP_PARTS = {
    "data_seconds": "data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimizer",
    "exposed_communication_seconds": "exposed communication",
    "idle_seconds": "pipeline idle",
    "other_seconds": "other",
}

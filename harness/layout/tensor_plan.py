"""The styles in which tensor parallelism cuts the weights of modules (Megatron-LM, arXiv 1909.08053).

A column-parallel layer computes its own outputs from the whole input, and the row-parallel one behind it sums over the
ranks; embedding and head are cut along the vocabulary. A gathered module is column-parallel, and its output is made
whole.
"""

# The styles of the project's decoder by the end of a module's path; every rank has all of a module that is not named.
TENSOR_PLAN = {
    "embed_tokens": "vocabulary",
    "self_attn.q_proj": "column",
    "self_attn.k_proj": "column",
    "self_attn.v_proj": "column",
    "self_attn.o_proj": "row",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
    "lm_head": "vocabulary",
}

# The dimension of a weight of shape (out, in) that each style cuts; a bias is cut as its outputs are.
SHARD_DIM = {"vocabulary": 0, "column": 0, "gathered": 0, "row": 1}

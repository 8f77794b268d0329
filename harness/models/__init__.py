"""The models that every engine trains, and their transforms: checkpointing, offload, compile, loss chunks."""

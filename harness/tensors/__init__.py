"""Helpers for torch tensors: storages, shards and FLOPs of single operators."""

"""The tests of the harness: units, real ranks, whole commands, and benchmarks."""

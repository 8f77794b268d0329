"""A finished run's columns, from what its ranks wrote down: memory, time, bytes, speed."""

"""The runs of one command: queued, made by an executor, shown while they run."""

"""Runs as jobs of Slurm: the executor that submits them, what a node runs, and the messages between both."""

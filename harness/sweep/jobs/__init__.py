"""Runs as jobs of a cluster: the executor, what a node runs, and the messages between both, whatever the cluster."""

"""The runs of one command: their queue, the executors that make them, and the display of their progress."""

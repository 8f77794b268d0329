"""The parent's side of a run: it starts the rank processes, monitors them and classifies how they ended."""

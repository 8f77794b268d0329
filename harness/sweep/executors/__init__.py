"""The executors of a command's runs: one after another or side by side on this machine, or as jobs of Slurm."""
